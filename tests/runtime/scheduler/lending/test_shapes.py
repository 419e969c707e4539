"""Loans of all page sets of some layers, on counting clusters: which layers ask, what is lent, what comes back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

from runtime.config import ClusterConfig, Placement
from runtime.engine.fakes.integer_loans import IntegerLoans
from runtime.engine.fakes.integer_model import counting_model
from runtime.lending_config import LendingConfig, LoanShape
from runtime.loans import LoanQuery
from runtime.messages import SendAway
from tests.runtime.scheduler.lending.test_lending import cluster, prompt
from tests.runtime.scheduler.lending.test_negotiation import cluster as negotiating
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

#: Six attention layers, four tokens to a page.
SIX = counting_model("m", "1* 2* 3* 4* 5* 6*", max_model_len=4000)


def of_six_layers(
    shape: LoanShape, devices: int, pages: int, cuts: Sequence[tuple[int, ...]] = ((),),
    placement: Placement = "replicate", cap: float = 0.9,
) -> VirtualCluster:  # fmt: skip
    lending = LendingConfig("planned", cap, shape=shape, cut_tokens=1)
    config = ClusterConfig(devices=devices, placement=placement, prefill_chunk=8, lending=lending)
    return VirtualCluster([SIX], cuts, devices=devices, pages=pages, config=config)


def layers_sent(one: VirtualCluster) -> set[tuple[int, int]]:
    return {message.layers for _, _, _, message in one.sent if isinstance(message, SendAway)}


def questions(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Return the number of questions by layer, from now on."""
    found, attend = defaultdict[int, int](int), IntegerLoans.attend

    def counted(self: IntegerLoans, query: LoanQuery, debtor: str) -> object:
        found[query.layer] += 1
        return attend(self, query, debtor)

    monkeypatch.setattr(IntegerLoans, "attend", counted)
    return found


def test_a_sequence_that_is_a_little_too_long_asks_in_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    for shape in ("tokens", "layers"):
        with monkeypatch.context() as patch:
            found = questions(patch)
            one = cluster(2, 60, shape=shape)  # three layers: 20 page sets of four tokens
            one.ask(request("a", prompt(60), "m", max_tokens=40))
            one.run()
            one.expect()
            asked[shape] = dict(found)
            assert one.scheduler.state().counters.loans > 0
    assert set(asked["tokens"]) == {0, 1, 2} and set(asked["layers"]) == {0}
    assert sum(asked["layers"].values()) < sum(asked["tokens"].values()) / 2


def test_layers_are_lent_whole_and_then_what_grows_in_them() -> None:
    one = cluster(3, 60, shape="layers")
    one.ask(request("a", prompt(150), "m", max_tokens=20))
    one.run()
    one.expect()
    assert layers_sent(one) == {(0, 2)}, "60 pages hold one layer of 43 page sets: the last one stays"
    upto = defaultdict[int, int](int)
    for _, _, _, message in one.sent:
        if isinstance(message, SendAway):
            for layer in range(*message.layers):
                assert message.first == upto[layer], "of each layer, the first tokens first"
                upto[layer] = message.last
    pages = sum(end // 4 for end in upto.values())
    assert (
        pages == one.scheduler.state().counters.loan_pages == sum(e.extra["pages"] for e in one.trace.named("kv.lend"))
    )


def test_cheapest_is_layers_for_short_contexts_and_tokens_for_long_ones() -> None:
    for mib, parts in ((1.0, True), (1e-9, False)):
        one = cluster(2, 60, shape="cheapest", layer_mib=mib)
        one.ask(request("a", prompt(60), "m", max_tokens=40))
        one.run()
        one.expect()
        assert any(layers != (0, 3) for layers in layers_sent(one)) == parts


def test_a_path_of_several_devices_lends_page_sets_of_all_its_layers_there() -> None:
    one = of_six_layers("layers", 5, 60, [(2,)], placement="partition")
    one.ask(request("a", prompt(80), "m", max_tokens=20))
    one.run()
    one.expect()
    assert len({to for _, _, to, message in one.sent if isinstance(message, SendAway)}) > 0
    assert {layers[0] for layers in layers_sent(one)} == {0} and (0, 1) not in layers_sent(one)


def test_pages_of_layers_come_back() -> None:
    one = cluster(2, 60, shape="layers", recall=0.0)
    one.ticks(MS, 400 * MS)
    one.ask(request("a", prompt(20), "m", max_tokens=50, ignore_eos=True))
    one.ask(request("b", prompt(30, 1), "m", max_tokens=30, ignore_eos=True))
    one.run()
    one.expect()
    back = {event.extra["loan"] for event in one.trace.named("kv.recall")}
    first = {e.extra["loan"]: e.extra["layers"][0] for e in one.trace.named("kv.lend") if "layers" in e.extra}
    assert {first[loan] for loan in back} == {0, 1}, "loans that begin at the first layer, and behind it"
    begun = min(event.t for event in one.trace.named("kv.recall"))
    assert all(event.t < begun for event in one.trace.named("batch.preempt")), "what came back was of use"


@pytest.mark.parametrize("shape", ["tokens", "layers"])
@pytest.mark.parametrize(("devices", "pages"), [(3, 60), (4, 64), (4, 70), (3, 33)])
def test_an_answer_ends_where_all_devices_are_full_whatever_is_left_over(
    shape: LoanShape, devices: int, pages: int
) -> None:
    """Also where a device lends pages that are no whole page sets: nothing waits for these, or runs again for them."""
    for tokens in (20, 60, 100):
        one = of_six_layers(shape, devices, pages)
        one.ask(request("a", prompt(tokens), "m", max_tokens=400, ignore_eos=True))
        one.run()
        told, most = one.told["a"], pages // 6 + (devices - 1) * (int(0.9 * pages) // 6)
        if tokens <= 4 * most:
            assert (told.last.finish, len(told.tokens)) == ("length", 4 * most - tokens)
            assert one.scheduler.state().counters.preemptions == 0
        else:
            assert f"lend at most {6 * (most - pages // 6)}" in (told.last.error or "")
        one.expect_empty()


def test_where_no_device_takes_a_whole_layer_page_sets_of_it_are_lent() -> None:
    one = cluster(5, 60, shape="layers", cap=0.2)  # twelve pages each: a layer has 30
    one.ask(request("a", prompt(80), "m", max_tokens=40))
    one.run()
    one.expect()
    assert any(layers != (0, 3) for layers in layers_sent(one))


def test_creditors_are_found_by_asking_for_layers_too() -> None:
    one = negotiating(3, 60, shape="layers")
    one.ask(request("a", prompt(100), "m", max_tokens=20), at=50 * MS)
    one.run(until=3_000 * MS)
    one.expect()
    assert one.scheduler.state().counters.pool_grants > 0 and any(layers != (0, 3) for layers in layers_sent(one))


def test_where_no_device_grants_a_whole_layer_less_is_asked_for() -> None:
    one = negotiating(5, 60, shape="layers", cap=0.2)  # twelve pages each: a layer has 26
    one.ask(request("a", prompt(90), "m", max_tokens=10), at=50 * MS)
    one.run(until=3_000 * MS)
    one.expect()
    assert any(layers != (0, 3) for layers in layers_sent(one))


def test_by_default_short_contexts_are_lent_by_layers() -> None:
    config = ClusterConfig(devices=2, placement="replicate", prefill_chunk=8, lending=LendingConfig("planned"))
    one = VirtualCluster([SIX], [()], devices=2, pages=60, config=config)
    one.ask(request("a", prompt(40), "m", max_tokens=20))
    one.run()
    one.expect()
    assert layers_sent(one) and (0, 6) not in layers_sent(one)
