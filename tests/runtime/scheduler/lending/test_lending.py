"""Loans on counting clusters: contexts beyond a device, the cap, refusals, deaths, and a ledger that adds up (IL-04).

Every token depends on every page, so a wrong, missing or stale page on any device changes the answer.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_model import counting_model, expected
from runtime.lending_config import LendingConfig, LendingMode
from runtime.messages import CloseSequences, SendAway, StartMigration
from tests.runtime.scheduler.anything import Anything
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

#: Three attention layers, four tokens to a page: 75 pages for 100 tokens.
M = counting_model("m", "1* 2 3* 4* 5", max_model_len=4000)


def cluster(
    devices: int = 3, pages: int = 60, mode: LendingMode = "planned", made: type[VirtualCluster] = VirtualCluster,
    **changes: Any,
) -> VirtualCluster:  # fmt: skip
    lending = LendingConfig(
        mode,
        # Pages are of four tokens here: loans are cut anywhere, so that small pools lend.
        **{"shape": "tokens", "cut_tokens": 1}
        | {
            name: changes.pop(name)
            for name in ("cap", "busy", "recall", "reclaim", "circle_pages", "mend", "shape", "layer_mib", "cut_tokens")
            if name in changes
        },
    )
    settings = changes.pop("settings", {})
    config = ClusterConfig(
        devices=devices, placement=changes.pop("placement", "replicate"), prefill_chunk=8, lending=lending, **settings
    )
    return made([M], [()], devices=devices, pages=pages, config=config, **changes)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(tokens)]


@pytest.mark.parametrize("shape", ["tokens", "layers"])
@pytest.mark.parametrize(("devices", "pages", "tokens"), [(2, 60, 90), (3, 60, 170), (4, 30, 110), (9, 30, 260)])
def test_contexts_beyond_a_device_are_answered_exactly(devices: int, pages: int, tokens: int, shape: str) -> None:
    one = cluster(devices, pages, shape=shape)
    one.ask(request("a", prompt(tokens), "m", max_tokens=20))
    one.run()
    one.expect()
    counters = one.scheduler.state().counters
    assert tokens / 4 * 3 > pages and counters.loans > 0 and counters.preemptions == 0
    lent = sum(event.extra["pages"] for event in one.trace.named("kv.lend"))
    assert counters.loan_pages == lent > tokens / 4 * 3 - pages


@pytest.mark.parametrize("pages", range(38, 56, 3))
def test_what_is_lent_is_never_all_that_its_device_has_written(pages: int) -> None:
    """Whatever number of page sets a prompt begins with, and a chunk has: the device can give away what it is to."""
    one = cluster(4, pages, placement="partition")
    one.ask(request("beside", prompt(24), "m", max_tokens=40, ignore_eos=True))
    one.ask(request("a", prompt(70, 1), "m", max_tokens=10), at=5 * MS)
    one.run()
    one.expect()
    counters = one.scheduler.state().counters
    assert counters.loans > 0 and counters.preemptions == 0


def test_without_lending_the_error_names_both_sizes_and_with_it_what_may_be_lent() -> None:
    off, less = cluster(mode="off"), cluster(cap=0.1)
    for one in (off, less):
        one.ask(request("a", prompt(100), "m"))
        one.run()
    assert off.told["a"].last.error == "its 100 tokens need 78 pages on d0, which has 60"
    assert less.told["a"].last.error == (
        "its 100 tokens need 78 pages on d0, which has 60; the devices that are not on its path lend at most 12"
    )


def test_an_answer_ends_where_all_devices_are_full() -> None:
    one = cluster(2, 60, cap=0.5)
    one.ask(request("a", prompt(20), "m", max_tokens=1000, ignore_eos=True))
    one.run()
    told = one.told["a"]
    assert told.last.finish == "length" and len(told.tokens) == 30 * 4 - 20, "30 page sets: 60 pages and 30 lent ones"
    assert told.tokens == expected(M, prompt(20), one.requests["a"].sampling)[: len(told.tokens)]
    one.expect_empty()


def test_the_cap_is_never_exceeded_and_zero_lends_nothing() -> None:
    for cap in (0.0, 0.3, 1.0):
        one = cluster(3, 60, cap=cap)
        for number in range(3):
            one.ask(request(f"s{number}", prompt(40, number), "m", max_tokens=60), at=number * MS)
        most = Counter[str]()
        while one._heap:
            one.run_one()
            most |= one.scheduler.lending.loans.lent()
        assert all(pages <= int(60 * cap) for pages in most.values())
        assert (sum(most.values()) > 0) == (cap > 0)
        if cap:
            one.expect()
        else:
            assert [len(told.tokens) for told in one.told.values()] == [40, 40, 40], "a device holds 80 tokens"


def test_a_busy_device_lends_nothing() -> None:
    for busy in (1.0, 0.02):
        one = cluster(2, 60, busy=busy, settings={"max_num_seqs": 16})
        one.ask(request("w0", prompt(4), "m"), request("w1", prompt(4), "m"))  # so that both load the model
        one.ask(request("long", prompt(30), "m", max_tokens=60), at=30 * MS)
        one.ask(request("beside", prompt(10), "m", max_tokens=60), at=31 * MS)
        known, loads = set[int](), list[int]()
        while one._heap:
            one.run_one()
            for loan in one.scheduler.lending.loans:
                if loan.number not in known:
                    known.add(loan.number)
                    loads.append(one.scheduler.devices[loan.creditor].passing.count)
        one.expect()
        assert loads and (max(loads) > 0) == (busy == 1.0)


def test_two_devices_hold_pages_for_each_other() -> None:
    one = cluster(2, 90)
    for number in range(6):
        one.ask(request(f"s{number}", prompt(30, number), "m", max_tokens=10 + 15 * number), at=number * MS)
    pairs: set[tuple[str, str]] = set()
    while one._heap:
        one.run_one()
        pairs |= one.scheduler.lending.loans.debts().keys()
    one.expect()
    assert pairs == {("d0", "d1"), ("d1", "d0")}


def test_the_ledger_is_what_the_devices_hold() -> None:
    one = cluster(4, 60)
    for number in range(3):
        one.ask(request(f"s{number}", prompt(60, number), "m", max_tokens=40), at=number * MS)
    seen = 0
    while one._heap:
        one.run_one()
        loans = one.scheduler.lending.loans
        if any(not loan.standing for loan in loans) or any(node.coming for node in one.living()):
            continue
        assert loans.lent() == Counter({node.name: node.agent.pages().lent for node in one.living()})
        seen += len(loans)
    one.expect()
    assert seen > 0 and not one.scheduler.lending.loans.debts()


def test_pages_are_there_before_they_are_given_up_and_come_once() -> None:
    one = cluster(3, 60)
    one.ask(request("a", prompt(150), "m", max_tokens=20))
    one.run()
    one.expect()
    begun, away, upto = 0, 0, 0
    for _, _, to, message in one.sent:
        if isinstance(message, StartMigration):
            assert message.loan and message.first == upto and begun == away
            begun += 1
        elif isinstance(message, SendAway):
            assert (message.first, to) == (upto, "d0")
            away, upto = away + 1, message.last
    assert begun == away == one.scheduler.state().counters.loans
    assert {to for _, _, to, message in one.sent if isinstance(message, CloseSequences)} == {"d0", "d1", "d2"}


@pytest.mark.parametrize("shape", ["tokens", "layers"])
@pytest.mark.parametrize("victim", ["d0", "d1", "d2"])
def test_whoever_dies_every_token_comes_once(victim: str, shape: str) -> None:
    lost = 0
    for at in range(0, 140, 7):
        one = cluster(3, 60, shape=shape)
        one.ask(request("a", prompt(120), "m", max_tokens=40))
        one.at(at * MS, lambda one=one: one.kill(victim))
        one.run()
        one.expect()
        lost += one.scheduler.state().counters.preemptions
        assert not len(one.scheduler.lending.loans)
    assert lost > 0


def test_an_abort_frees_the_pages_of_creditors() -> None:
    for at in range(0, 120, 3):
        one = cluster(3, 60)
        one.ask(request("a", prompt(120), "m", max_tokens=40))
        one.abort("a", at * MS)
        one.run(until=(at + 5) * MS)
        one.expect_empty()


def test_a_creditor_that_refuses_is_not_asked_again_at_once() -> None:
    one = cluster(3, 60, damage=lambda pages: pages.seq == "a" and len(one.sent) < 400)
    one.ask(request("a", prompt(120), "m", max_tokens=40))
    one.run()
    one.expect()
    counters = one.scheduler.state().counters
    assert counters.loans_refused > 0 and counters.loans > 0
    asked = [(at, to) for at, _, to, message in one.sent if isinstance(message, StartMigration)]
    refused = one.trace.named("kv.lend.none")
    for event in refused:
        assert not [to for at, to in asked if to == event.dev and event.t <= at < event.t + 100 * MS]


def test_loans_give_way_to_sequences_of_a_higher_rank_there() -> None:
    one = cluster(2, 60)
    one.ask(request("late", prompt(60), "m", max_tokens=50, priority=1))
    one.ask(request("first", prompt(30, 1), "m", max_tokens=40), at=40 * MS)
    one.run()
    one.expect()
    assert {event.seq for event in one.trace.named("batch.preempt")} == {"late"}
    assert one.scheduler.state().counters.loans > 0


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_with_loans(seed: int) -> None:
    one = Anything(seed=seed, lends=True)
    one.run()
    one.expect_end()


def test_schedules_with_loans_do_have_all_of_it() -> None:
    seen: Counter[str] = Counter()
    for seed in (*range(24, 40), 370, 634):
        one = Anything(seed=seed, lends=True)
        one.run()
        one.expect_end()
        counters = one.scheduler.state().counters
        seen["loans"] += counters.loans
        seen["recalls"] += counters.loan_recalls
        seen["preempted"] += counters.preemptions
        seen["migrated"] += counters.moves
        seen["shared"] += counters.shared
        seen["swapped in"] += counters.swapped_in
        seen["deaths"] += len(one.trace.named("fault"))
        seen["of some layers"] += len([event for event in one.trace.named("kv.lend") if "layers" in event.extra])
    assert min(seen.values()) > 0 and len(seen) == 8, seen
