"""Loans beside what else changes places: models that are swapped, members of circles that end, deaths, moves."""

from __future__ import annotations

from collections import Counter

from runtime.config import ClusterConfig
from runtime.control.scheduler_io import MoveSequence
from runtime.engine.fakes.integer_model import counting_model
from runtime.lending_config import LendingConfig
from tests.runtime.scheduler.lending.test_lending import cluster, prompt
from tests.runtime.scheduler.lending.test_recalls import END, rivals
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request


def test_a_member_of_a_circle_that_is_aborted_ends_at_once_and_frees_its_pages() -> None:
    plain = rivals(3)
    plain.run()
    begun = [event.t for event in plain.trace.named("kv.circle")]
    ended = [event.t for event in plain.trace.named("kv.circle.end")]
    assert begun and len(begun) == len(ended)
    hit = 0
    for seq in ("s1", "s3", "s4"):
        for at in range(begun[0] - MS // 2, ended[0] + MS // 2, MS):
            one = rivals(3)
            one.abort(seq, at)
            one.at(at + 1, lambda one=one, seq=seq: _is_gone(one, seq))
            one.run()
            one.expect_empty()
            hit += any(event.t > at > begun[0] for event in one.trace.named("kv.circle.end"))
    assert hit > 2, "circles that went on without it"


def _is_gone(one: VirtualCluster, seq: str) -> None:
    assert seq not in one.scheduler.sequences
    assert all(loan.sequence.seq != seq for loan in one.scheduler.lending.loans)


def test_models_that_are_swapped_while_their_devices_lend() -> None:
    """Devices with room for the weights of one model: what is lent needs no weights, and stays while these change."""
    models = [counting_model(f"m{at}", f"1* 2 3* {at + 10}* {at + 50}", max_model_len=400) for at in range(4)]
    config = ClusterConfig(
        devices=2, placement="on-demand", residency="swap", swap_patience_ms=5, prefill_chunk=8,
        lending=LendingConfig("planned"),
    )  # fmt: skip
    one = VirtualCluster(models, [(3,)] * 4, devices=2, pages=60, limits=(5_000, 5_000), config=config)
    one.ticks(MS, END)
    one.ask(request("long", prompt(80), "m0", max_tokens=36, ignore_eos=True))
    for number in range(6):
        one.ask(
            request(f"s{number}", prompt(8, number), f"m{1 + number % 3}", max_tokens=6), at=(40 + 12 * number) * MS
        )
    one.run()
    one.expect()
    loads = {event.t for event in one.trace.named("kv.lend")}
    assert loads and one.scheduler.residency.counts.unloads > 2
    ends = next(event.t for event in one.trace.events if event.ev == "finish" and event.seq == "long")
    during = [event for event in one.trace.events if event.ev == "finish" and min(loads) < event.t < ends]
    assert len(during) > 1, "answers of models that came while pages were lent"


def test_a_sequence_with_loans_does_not_migrate_and_does_once_its_pages_are_back() -> None:
    one = cluster(3, 60, recall=1.0)
    one.ticks(MS, END)
    one.ask(request("a", prompt(60), "m", max_tokens=60, ignore_eos=True))
    tried = list[int]()

    def move() -> None:
        if "a" in one.scheduler.sequences and one.scheduler.sequences["a"].path:
            tried.append(len(one.scheduler.lending.loans))
            one.tell(MoveSequence("a", 0, 5, "d2"))

    for at in range(10, 120, 5):
        one.at(at * MS, move)
    one.run()
    one.expect()
    assert max(tried) > 0 and one.scheduler.state().counters.loans > 0


def test_a_device_that_decodes_dies_with_pages_that_it_lends() -> None:
    found: Counter[str] = Counter()
    for at in range(20, 60, 4):
        one = rivals(3)
        one.at(at * MS, lambda one=one: one.kill("d0"))
        one.run()
        one.expect()
        found["lent"] += any(event.dev == "d0" and event.t < at * MS for event in one.trace.named("kv.lend"))
        assert not one.scheduler.lending.loans.debts() and not one.scheduler.lending.loans.recalls
    assert found["lent"] > 3
