"""Loans of all page sets of some layers, on counting clusters: which layers ask, what is lent, what comes back."""

from __future__ import annotations

from collections import defaultdict

import pytest

from runtime.engine.fakes.integer_loans import IntegerLoans
from runtime.loans import LoanQuery
from runtime.messages import SendAway
from tests.runtime.scheduler.lending.test_lending import cluster, prompt
from tests.runtime.scheduler.lending.test_negotiation import cluster as negotiating
from tests.runtime.scheduler.lending.test_recalls import two_that_share_a_device
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request


def layers_sent(one: VirtualCluster) -> set[tuple[int, int]]:
    return {message.layers for _, _, _, message in one.sent if isinstance(message, SendAway)}


def questions(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Return the number of questions by layer, from now on."""
    found, attend = defaultdict[int, int](int), IntegerLoans.attend

    def counted(self: IntegerLoans, query: LoanQuery) -> object:
        found[query.layer] += 1
        return attend(self, query)

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


def test_a_path_of_several_devices_lends_page_sets_of_all_its_layers() -> None:
    one = cluster(4, 30, shape="layers", placement="partition")
    one.ask(request("a", prompt(110), "m", max_tokens=20))
    one.run()
    one.expect()
    hops = {message.layers for _, _, _, message in one.sent if isinstance(message, SendAway)}
    assert all(first == 0 for first, _ in hops)


def test_pages_of_layers_come_back() -> None:
    one = two_that_share_a_device(shape="layers")
    one.run()
    one.expect()
    counters = one.scheduler.state().counters
    assert counters.loan_recalls > 0 and any(layers != (0, 3) for layers in layers_sent(one))


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


def test_a_sequence_with_some_layers_away_runs_again_if_their_holder_dies() -> None:
    one = cluster(3, 60, shape="layers")
    one.ask(request("a", prompt(120), "m", max_tokens=40))
    one.at(60 * MS, lambda: one.kill("d1"))
    one.run()
    one.expect()
    assert {event.extra["why"] for event in one.trace.named("kv.mend.none")} == {"some layers of it are lent"}
