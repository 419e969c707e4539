"""Decode steps over lent pages in one native call a layer: the bits of one device; all else as in Python (IL-27)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.cluster.agent_process.side_link import SidePeers
from runtime.engine.attention.away import AwayAttention
from runtime.engine.kernels.paged_attention import native_attention
from runtime.engine.layers.operations import NativeOperations
from runtime.engine.tensors.convert import array_of
from runtime.lending_config import LoanShipping
from runtime.loans import LoanQuery
from runtime.types import LoanLost
from tests.runtime.cluster.agent_process import lent_rows
from tests.runtime.cluster.agent_process.lent_rows import ENDS, KV_HEADS, LAYERS, PAGE, Cluster, Debtor, Rows
from tests.runtime.cluster.agent_process.test_known_answers import LIES, lying_creditor
from tests.runtime.engine.compiled import needs_kernels

pytestmark = needs_kernels


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made = list[Cluster]()

    def one(*given: Any) -> Cluster:
        made.append(Cluster(tmp_path, *given))
        return made[-1]

    yield one
    for each in made:
        each.close()


@pytest.mark.parametrize("native", ["client server", "client", "server", ""])
@pytest.mark.parametrize(("rows", "dtype"), [(1, "float32"), (3, "float32"), (2, "bfloat16")])
def test_a_step_has_the_bits_of_one_device(make: Callable[..., Cluster], rows: int, dtype: str, native: str) -> None:
    context = Rows(rows, dtype)
    cluster = make(context, native)
    for step in range(4):
        want = [context.whole(layer, context.now(10 * step + layer)) for layer in range(LAYERS)]
        assert all(map(torch.equal, cluster.debtor.step(10 * step), want))
    if "client" in native:
        done = cluster.debtor.done
        assert len(done) >= 4 * LAYERS - 1, "the first question makes the connection"
        assert sum(each.merged for each in done) > len(done) // 2, "some may take longer than a native call waits"
    for each in cluster.held.values():
        assert each.calls <= 3 * LAYERS if "server" in native else each.calls == 4 * LAYERS


@pytest.mark.parametrize(("query", "out"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_queries_and_results_may_be_bfloat16(make: Callable[..., Cluster], query: str, out: str) -> None:
    context = Rows(1, "bfloat16")
    cluster = make(context)
    for step in range(3):
        want = [context.whole(layer, context.now(10 * step + layer, query)) for layer in range(LAYERS)]
        made = cluster.debtor.step(10 * step, query, out)
        assert all(torch.equal(mine, each.to(mine.dtype)) for mine, each in zip(made, want, strict=True))
    assert sum(each.received == 2 and each.merged for each in cluster.debtor.done) > LAYERS


def test_queries_may_change_their_type_from_layer_to_layer(make: Callable[..., Cluster]) -> None:
    context, types = Rows(1, "bfloat16"), "float32 bfloat16"
    cluster = make(context)
    for step in range(3):
        want = [context.whole(layer, context.now(step + layer, types.split()[layer % 2])) for layer in range(LAYERS)]
        assert all(map(torch.equal, cluster.debtor.step(step, types), want))
    assert sum(each.merged for each in cluster.debtor.done) > LAYERS


def test_queries_may_change_their_type_from_step_to_step(make: Callable[..., Cluster]) -> None:
    """And questions kept from a step are not those of one with another type."""
    context = Rows(1, "bfloat16")
    cluster = make(context)
    for step in range(6):
        kind = ("float32", "bfloat16")[step % 2]
        want = [context.whole(layer, context.now(step + layer, kind)) for layer in range(LAYERS)]
        assert all(map(torch.equal, cluster.debtor.step(step, kind), want))
    assert sum(each.merged for each in cluster.debtor.done) > 2 * LAYERS


def test_parts_are_found_behind_layers_with_other_heads(make: Callable[..., Cluster]) -> None:
    """What native code has done of a layer is where Python does the rest."""
    context = Rows()
    cluster = make(context, "client")
    cluster.debtor.step(0)
    held = cluster.held["d2"]
    held.answer_late(3, 0.2)
    made, merge = native_attention(lent_rows.kernels()), NativeOperations(lent_rows.kernels()).merge
    backend = AwayAttention(made, context.paging(True), cluster.debtor.reached, merge)
    for layer, heads in enumerate((4, 8, 4)):
        now = context.now(layer)._replace(query=torch.randn(1, heads, lent_rows.WIDTH))
        out = torch.zeros(now.query.shape)
        backend.decode(layer, now, out)
        assert torch.equal(out, context.whole(layer, now))
    assert [each.received for each in cluster.debtor.done[-3:]] == [2, 2, 1]


def test_questions_follow_loans_that_grow(make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept from step to step, but not beyond a change of what is lent."""
    context = Rows()
    cluster = make(context)
    for last in (192, 256):
        lent = cluster.held["d2"].lent
        lent.drop_loan(0)
        lent.hold_loan(0, context.tables[0, :, 64 // PAGE : last // PAGE].t().tolist(), last - 64, "d0")
        monkeypatch.setitem(ENDS, "d2", last)
        for step in range(3):
            want = [context.whole(layer, context.now(step + layer)) for layer in range(LAYERS)]
            assert all(map(torch.equal, cluster.debtor.step(step), want))
    assert sum(each.merged for each in cluster.debtor.done) > 2 * LAYERS


def test_packets_do_not_overtake_a_question_that_is_open(make: Callable[..., Cluster]) -> None:
    """A creditor answers in the order of questions, however they were sent."""
    context = Rows()
    link = make(context).debtor.link
    question = LoanQuery(((0,),), ((ENDS["d1"],),), (1,), 0, KV_HEADS, "float32")
    ticket = link.send_query("d1", question, (array_of(context.now(0).query),))
    assert link.find_places(["d1"]) is None
    assert len(link.collect(ticket)) == 2
    assert link.find_places(["d1"]) is not None


def test_a_late_answer_to_a_step_that_was_given_up_is_not_taken(make: Callable[..., Cluster]) -> None:
    context = Rows()
    cluster = make(context)
    for step in range(2):
        cluster.debtor.step(step)
    held = cluster.held["d2"]
    held.free.clear()
    held.lent.hold_loan(9, [[0]], PAGE, "d0")  # what is known is asked of Python again
    with pytest.raises(LoanLost, match="d2 did not answer"):
        cluster.debtor.step(40)
    held.free.set()
    for step in range(50, 53):
        want = [context.whole(layer, context.now(step + layer)) for layer in range(LAYERS)]
        assert all(map(torch.equal, cluster.debtor.step(step), want))


@pytest.mark.parametrize(("how", "heads", "native"), [
    ("query", 4, True), ("query", 64, True), ("cheapest", 4, True), ("cheapest", 64, False), ("pages", 4, False),
])  # fmt: skip
def test_steps_are_native_where_pages_do_not_travel(
    make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, how: LoanShipping, heads: int, native: bool
) -> None:
    """Also as `cheapest`, but where pages are fewer bytes: of d1's with 64 heads of queries to one of K and V."""
    monkeypatch.setattr(lent_rows, "HEADS", heads)
    monkeypatch.setattr(lent_rows, "KV_HEADS", 1)
    context = Rows()
    cluster = make(context)
    cluster.debtor.step(0)  # the first question makes the connection
    before = len(cluster.debtor.done)
    cluster.debtor.ship(how)
    for step in range(20):
        want = [context.whole(layer, context.now(step + layer)) for layer in range(LAYERS)]
        assert all(map(torch.equal, cluster.debtor.step(step), want))
    assert len(cluster.debtor.done) - before == native * 20 * LAYERS
    counts = cluster.debtor.costs.counts
    assert counts["answers"] == counts["attended"] == counts["learns"] and counts["pages"] == counts["pulled"]
    if how == "cheapest" and not native:
        assert (counts["choices"], counts["learns"]) == (2 * 60, 35), "of d1 the first 32, then every eighth"
        assert counts["pulled"] >= 4


def test_an_answer_that_takes_long_is_awaited_in_python(make: Callable[..., Cluster]) -> None:
    """It looks for the creditor's life meanwhile, and the step goes on natively afterwards."""
    context, looks = Rows(), list[int]()
    cluster = make(context)
    cluster.debtor.step(0)
    held = cluster.held["d2"]

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            held.free.set()

    cluster.debtor.link.look = look
    held.free.clear()
    held.lent.hold_loan(9, [[0]], PAGE, "d0")  # what is known is asked of Python again
    want = [context.whole(layer, context.now(30 + layer)) for layer in range(LAYERS)]
    assert all(map(torch.equal, cluster.debtor.step(30), want))
    assert len(looks) >= 3
    assert cluster.debtor.done[-LAYERS].received < 2
    packets = cluster.debtor.link._packets
    assert packets is not None and not packets._open, "all answers were received where they were due"


def test_a_creditor_that_is_no_peer_any_more_is_not_asked(make: Callable[..., Cluster]) -> None:
    cluster = make(Rows())
    for step in range(2):
        cluster.debtor.step(step)
    calls = len(cluster.debtor.done)
    first = cluster.peers.get("d1")
    assert first is not None
    cluster.peers.update({"d1": first})
    with pytest.raises(LoanLost, match="d2, which holds K and V, is gone"):
        cluster.debtor.step(5)
    assert len(cluster.debtor.done) == calls


def test_a_creditor_that_is_gone_is_a_lost_loan(make: Callable[..., Cluster]) -> None:
    cluster = make(Rows())
    for step in range(2):
        cluster.debtor.step(step)
    cluster._closing.pop(1).close()  # d2
    for _ in range(2):
        with pytest.raises(LoanLost, match="d2 did not answer"):
            cluster.debtor.step(5)


def outcome(folder: Path, lie: bytes, native: bool, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a debtor makes of two right answers, a lie and an answer to the next question, and the text of its error."""
    monkeypatch.setitem(ENDS, "d1", 192)
    monkeypatch.delitem(ENDS, "d2")
    peers, out = SidePeers(), list[object]()
    peers.update({"d1": (1, f"unix://{folder}/d1")})
    with lying_creditor(folder, lie):
        debtor = Debtor(Rows(), peers, native, 0.4)
        for step in range(2):
            try:
                out.append([each.tolist() for each in debtor.step(step)])
            except LoanLost as error:
                out.append(str(error))
        debtor.link.close()
    monkeypatch.undo()
    return out


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_creditor_is_treated_as_without_native_code(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for native in (True, False):
        (folder := tmp_path / f"n{native}").mkdir()
        found.append(outcome(folder, LIES[lie](), native, monkeypatch))
    assert found[0] == found[1]
