"""Decode steps over lent pages in one native call a layer: the bits of one device; all else as in Python (IL-27)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.chains import Array
from runtime.cluster.agent_process.side_link import SideClient, SidePeers, SideServer, side_messengers
from runtime.config import EngineConfig
from runtime.engine.attention.away import AwayAttention, Creditors
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.lent import LentPages, native_exchange
from runtime.engine.attention.native_away import PacketCreditors
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.exchange import native_away
from runtime.engine.kernels.paged_attention import native_attention
from runtime.engine.layers.operations import NativeOperations
from runtime.engine.models.registry import kernels_for
from runtime.engine.step.context import AwayRow, PagedMetadata, RowSpan
from runtime.kv.pool import Geometry, PagePool
from runtime.loans import LoanLink, LoanQuery
from runtime.transport.channels.seqpacket import PACKET_BYTES
from runtime.transport.messenger import Messenger
from runtime.types import LoanLost, SentAway
from tests.runtime.cluster.agent_process.test_known_answers import LIES, lying_creditor
from tests.runtime.engine.compiled import needs_kernels

pytestmark = needs_kernels
HEADS, KV_HEADS, WIDTH, PAGE, LAYERS = 4, 2, 16, 8, 3
#: Tokens of which a creditor holds some: d1, d2; the rest is here.
ENDS, LENGTH = {"d1": 64, "d2": 192}, 333


def kernels() -> Kernels:
    found = kernels_for(EngineConfig())
    assert found is not None
    return found


@dataclass
class Rows:
    """Rows of one context length in pages, one behind the other, with K and V that differ by row and layer."""

    rows: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        made, kind = torch.Generator().manual_seed(4), getattr(torch, self.dtype)
        self.sets = -(-LENGTH // PAGE)
        count, half = self.rows * LAYERS * self.sets, PAGE * KV_HEADS * WIDTH * kind.itemsize
        self.pool, at = PagePool(2 * half * count, half), torch.arange(count * PAGE)
        k, v = (torch.randn(len(at), KV_HEADS, WIDTH, generator=made).to(kind) for _ in range(2))
        self.pool.view(Geometry(KV_HEADS, WIDTH, kind), PAGE).write(at // PAGE, at % PAGE, k, v)
        self.tables = torch.arange(count).view(self.rows, LAYERS, self.sets)
        self.key = torch.empty(self.rows, KV_HEADS, WIDTH, dtype=kind)

    def now(self, seed: int, dtype: str = "float32") -> Tokens:
        query = torch.randn(self.rows, HEADS, WIDTH, generator=torch.Generator().manual_seed(seed))
        return Tokens(query.to(getattr(torch, dtype)), self.key, self.key, AttentionSettings())

    def paging(self, away: bool) -> PagedMetadata:
        first, rows = 0, []
        for row in range(self.rows if away else 0):
            parts = []
            for name, last in ENDS.items():
                parts.append(SentAway("s", name, row, first, last))
                first = last
            rows.append(AwayRow(row, 0, tuple(parts)))
            first = 0
        empty = torch.empty(0, dtype=torch.int64)
        spans = tuple(RowSpan(row, row + 1, LENGTH - 1) for row in range(self.rows))
        return PagedMetadata(
            self.pool, PAGE, None, spans, self.tables, torch.full((self.rows,), LENGTH), empty.view(1, 0), empty, None,
            tuple(rows),
        )  # fmt: skip

    def whole(self, layer: int, now: Tokens) -> Tensor:
        """Attention on one device."""
        out = torch.zeros(now.query.shape)
        native_attention(kernels())(self.paging(False)).decode(layer, now, out)
        return out


class Held:
    """What one creditor holds of the rows. It waits for `free`; `calls`: how often Python attended."""

    def __init__(self, rows: Rows, name: str, first: int, last: int) -> None:
        self.lent = LentPages(native_attention(kernels()), rows.pool.second_lane(), torch.device("cpu"))
        for row in range(rows.rows):
            groups = rows.tables[row, :, first // PAGE : last // PAGE].t().tolist()
            self.lent.hold_loan(row, groups, last - first, "d0")
        self.calls, self.free = 0, threading.Event()
        self.free.set()

    def borrow(self, link: LoanLink, shipping: str = "query") -> None: ...

    def hold_loan(
        self, loan: int, groups: Sequence[Sequence[int]], tokens: int, debtor: str, first_layer: int = 0
    ) -> None: ...

    def drop_loan(self, loan: int) -> None: ...

    def attend_loans(self, query: LoanQuery, arrays: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        self.calls += 1
        assert self.free.wait(30)
        return self.lent.attend(query, arrays, debtor)


class Debtor:
    """A debtor's steps. `calls`: native calls, and how often Python did the rest of one."""

    def __init__(self, rows: Rows, peers: SidePeers, native: bool, seconds: float = 2.0) -> None:
        self.rows, self.done = rows, list[Any]()
        exchange = native_exchange(
            kernels(), LentPages(native_attention(kernels()), rows.pool, torch.device("cpu")), 1 << 20
        )
        call = native_away(kernels(), PACKET_BYTES)
        assert exchange is not None and call is not None
        self.link = SideClient(Messenger("d0", 1), peers, seconds, exchange.receiver if native else None)
        attend = call.attend

        def seen(*given: Any) -> Any:
            self.done.append(attend(*given))
            return self.done[-1]

        call.attend = seen  # type: ignore[method-assign]
        self._reached = Creditors(self.link, native=PacketCreditors(self.link, call) if native else None)

    def step(self, seed: int, query: str = "float32", out: str = "float32", creditors: int = 2) -> list[Tensor]:
        """Attend in all layers. `query`: types of the queries, of one layer after another."""
        paging = self.rows.paging(True)
        backend = AwayAttention(native_attention(kernels()), paging, self._reached, NativeOperations(kernels()).merge)
        results = []
        for layer in range(LAYERS):
            now = self.rows.now(seed + layer, query.split()[layer % len(query.split())])
            wide = torch.cat([now.query.flatten(1), torch.ones(self.rows.rows, 5, dtype=now.query.dtype)], 1)
            now = now._replace(query=wide[:, : HEADS * WIDTH].view(-1, HEADS, WIDTH))  # as in a layer's product
            results.append(torch.zeros(now.query.shape, dtype=getattr(torch, out)))
            backend.decode(layer, now, results[-1])
        return results


class Cluster:
    def __init__(self, folder: Path, rows: Rows, native: str = "client server") -> None:
        self.held, self._closing, first = dict[str, Held](), list[SideServer | SideClient](), 0
        peers, debtors, known = SidePeers(), SidePeers(), {}
        debtors.update({"d0": (1, "")})
        for name, last in ENDS.items():
            self.held[name] = Held(rows, name, first, last)
            exchange = native_exchange(kernels(), self.held[name].lent, PACKET_BYTES)
            server, client = side_messengers(name, 1, f"unix://{folder}/{name}", None, None)
            client.close()
            known_here = exchange.known if exchange is not None and "server" in native else None
            self._closing.append(SideServer(self.held[name], server, debtors, known_here))
            known[name] = 1, server.address
            first = last
        peers.update(known)
        self.peers, self.debtor = peers, Debtor(rows, peers, "client" in native)
        self._closing.append(self.debtor.link)

    def close(self) -> None:
        for each in reversed(self._closing):
            each.close()


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
