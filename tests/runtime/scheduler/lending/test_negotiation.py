"""Negotiated loans on counting clusters: what is asked and refused, stale and silent managers (IL-12 to IL-17).

Every token depends on every page, so a page that is wrong, missing or taken twice changes the answer.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from runtime.config import ClusterConfig
from runtime.control.pool_io import PoolAnswer, PoolQuery
from runtime.control.scheduler_io import PauseSequence, ResumeSequence
from runtime.lending_config import LendingConfig
from runtime.messages import PoolBeat
from runtime.policy.lending.creditors import Creditor, refusal
from runtime.pool.manager import PoolManager
from runtime.scheduler.observe.replay_log import ReplayRecorder, head_of, replay
from tests.runtime.scheduler.lending.test_lending import M, prompt
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.scheduler.virtual_pool import Pooled
from tests.runtime.virtual import request


def cluster(devices: int = 3, pages: int = 60, **changes: Any) -> Pooled:
    names = ("cap", "busy", "beat_ms", "gone_ms", "managers", "shape", "cut_tokens")
    named = {"shape": "tokens", "cut_tokens": 1} | {name: changes.pop(name) for name in names if name in changes}
    lending = LendingConfig(changes.pop("mode", "negotiated"), **named)
    config = ClusterConfig(
        devices=devices, placement="replicate", prefill_chunk=8, lending=lending, **changes.pop("settings", {})
    )
    return Pooled([M], [()], devices=devices, pages=pages, config=config, **changes)


def long(one: Pooled, seq: str, tokens: int, answer: int = 20, at: int = 0, **more: Any) -> None:
    one.ask(request(seq, prompt(tokens, len(one.requests)), "m", max_tokens=answer, ignore_eos=True, **more), at=at)


def counters(one: Pooled) -> Any:
    return one.scheduler.state().counters


def names(one: Pooled, seq: str) -> list[str]:
    """Return what was said for a sequence, in order."""
    return [event.ev for event in one.trace.events if event.ev.startswith("pool.") and event.extra["seq"] == seq]


@pytest.mark.parametrize(("devices", "pages", "tokens"), [(2, 60, 90), (3, 60, 170), (9, 30, 260)])
@pytest.mark.parametrize("managers", [1, 3])
def test_contexts_beyond_a_device_are_answered_exactly(devices: int, pages: int, tokens: int, managers: int) -> None:
    one = cluster(devices, pages, managers=managers)
    long(one, "a", tokens)
    one.run()
    one.expect()
    said = counters(one)
    assert said.loans == said.pool_grants == said.pool_queries > 3 and not said.pool_unanswered
    assert {each.manager for each in one.answered} == set(range(managers)), "queries go to one manager after another"
    if managers == 1:  # several do not know what the other ones have promised
        assert names(one, "a") == ["pool.query", "pool.offer", "pool.ask", "pool.grant"] * said.loans


@pytest.mark.parametrize("shape", ["tokens", "layers"])
def test_where_no_creditor_has_room_for_a_step_less_is_granted(shape: str) -> None:
    """64 tokens are 48 pages, and each creditor lends at most 27."""
    one = cluster(6, 30, shape=shape, cut_tokens=64)
    long(one, "a", 90)
    one.run()
    one.expect()
    assert counters(one).loans > 1 and not counters(one).preemptions


def full_ones(devices: int, full: int) -> Pooled:
    """Fill some devices with paused sequences until 600 ms; managers do not know it until 400 ms."""
    one = cluster(devices, 60, gone_ms=10_000)
    one.at(3 * MS, lambda: one.silent.update(f"d{number}" for number in range(devices)))
    one.at(400 * MS, one.silent.clear)
    for number in range(full):
        seq = f"w{number}"
        long(one, seq, 77, 3, at=5 * MS)
        one.at(12 * MS, lambda seq=seq: one.tell(PauseSequence(seq)))
        one.at(600 * MS, lambda seq=seq: one.tell(ResumeSequence(seq)))
    return one


def test_creditors_are_asked_in_turn_and_none_of_them_twice() -> None:
    """Four of seven creditors are full, and the manager does not know it."""
    one = full_ones(8, 4)
    long(one, "a", 40, 130, at=100 * MS)
    one.run()
    one.expect()
    said = counters(one)
    assert said.pool_denials > 3 and said.loans > 0 and not said.preemptions
    searches: dict[str, list[str]] = {}
    for event in one.trace.events:
        if event.ev == "pool.offer":
            assert len(event.extra["creditors"]) <= 3
        elif event.ev == "pool.ask":
            searches.setdefault(event.extra["seq"], []).append(event.dev or "")
        elif event.ev in ("pool.grant", "pool.none"):
            asked = searches.pop(event.extra["seq"], [])
            assert len(asked) == len(set(asked))
    for query, answer in zip(one.asked, one.answered, strict=True):
        offered = {each.device for each in answer.offers}
        assert not offered & {*query.refused, *query.path, query.debtor}
    again = [query for query in one.asked if query.refused]
    assert again and len(again[0].refused) == 3, "all three have refused, and further ones are asked for"
    assert said.pool_denials == len(one.refused) == len(one.trace.named("pool.deny"))
    first = names(one, "a")
    assert first[:8] == ["pool.query", "pool.offer", *["pool.ask", "pool.deny"] * 3]
    assert first[8:10] == ["pool.query", "pool.offer"] and "pool.grant" in first[10:14]
    refusers = {event.dev: event.t for event in one.trace.named("pool.deny")}
    offers = [each for each in one.trace.named("pool.offer") if max(refusers.values()) < each.t < 400 * MS]
    assert offers and not any(refusers.keys() & each.extra["creditors"] for each in offers), "paused (IL-14)"


def test_a_creditor_that_refuses_asks_nothing_itself() -> None:
    """The creditor is full, and does not borrow for the debtor (IL-07)."""
    one = full_ones(2, 1)
    long(one, "a", 30, 60, at=100 * MS)
    one.run()
    one.expect()
    denials = one.trace.named("pool.deny")
    assert denials and {event.extra["why"] for event in denials} == {"it has no room"}
    creditors = {event.dev for event in denials}
    assert len(creditors) == 1 and not creditors & {query.debtor for query in one.asked}


def test_cap_and_load_are_the_creditors_to_decide() -> None:
    off = cluster(2, 60, cap=0.0)
    long(off, "a", 40, 100)
    off.run()
    assert not off.asked and off.told["a"].last.finish == "length" and len(off.told["a"].tokens) == 40
    busy = cluster(2, 60, busy=0.02, settings={"max_num_seqs": 16})
    busy.ask(request("w0", prompt(4), "m"), request("w1", prompt(4), "m"))
    long(busy, "long", 30, 60, at=30 * MS)
    long(busy, "beside", 10, 60, at=31 * MS)
    busy.run()
    busy.expect()
    assert {event.extra["why"] for event in busy.trace.named("pool.deny")} == {"it is busy"}


def test_a_creditor_that_fails_to_bring_the_pages_is_followed_by_the_next() -> None:
    one = cluster(3, 60, damage=lambda pages: pages.seq == "a" and len(one.sent) < 400)
    long(one, "a", 120, 40)
    one.run()
    one.expect()
    said = names(one, "a")
    at = said.index("pool.deny")
    assert said[at - 1 : at + 2] == ["pool.ask", "pool.deny", "pool.ask"]
    assert counters(one).loans > 0 and not any(len(each.offers) > 3 for each in one.answered)


def test_several_creditors_take_all_or_nothing() -> None:
    one = cluster(4, 60)
    long(one, "a", 200, 20)
    one.run()
    one.expect()
    asked = [event.extra["pages"] for event in one.trace.named("pool.ask")]
    lent = [event.extra["pages"] for event in one.trace.named("kv.lend")]
    assert asked == lent and len({event.dev for event in one.trace.named("kv.lend")}) == 3


# -- what managers do not know -----------------------------------------------------------------------------------------


def test_stale_heartbeats_never_overbook_a_creditor() -> None:
    """10,000 borrowings by books and heartbeats that are half a second old (IL-15)."""
    rng, one, names = random.Random(5), PoolManager(LendingConfig("negotiated", 0.5)), [f"d{at}" for at in range(12)]
    own, lent = dict.fromkeys(names, 0), {name: Counter[str]() for name in names}
    under_way: list[tuple[int, PoolBeat]] = []
    loans: list[tuple[int, str, str, int]] = []
    granted, denied, now = 0, 0, 0
    for number in range(10_000):
        now += 2 * MS
        for name in names if number % 50 == 0 else ():
            own[name] = max(0, min(100 - lent[name].total(), own[name] + rng.randrange(-30, 31)))
            book = tuple(sorted((+lent[name]).items()))
            under_way.append((now + 500 * MS, PoolBeat(name, "x", 100, 100 - own[name] - lent[name].total(), book)))
        while under_way and under_way[0][0] <= now:
            one.handle(under_way.pop(0)[1], now)
        while loans and loans[0][0] <= now:
            _, debtor, creditor, pages = loans.pop(0)
            lent[creditor][debtor] -= pages
        debtor, pages = rng.choice(names), rng.randrange(1, 20)
        answer = one.handle(PoolQuery(number, debtor, pages, pages), now)
        assert isinstance(answer, PoolAnswer)
        for offer in answer.offers:
            free, given = 100 - own[offer.device] - lent[offer.device].total(), lent[offer.device].total()
            if not refusal(Creditor(offer.device, free, given, 50, 0.0, True), 1.0, pages):
                lent[offer.device][debtor] += pages
                loans.append((now + 200 * MS, debtor, offer.device, pages))
                granted += 1
                break
            denied += 1
        assert all(book.total() <= 50 and own[name] + book.total() <= 100 for name, book in lent.items())
    assert granted > 3000 and denied > 300, (granted, denied)


def test_stale_heartbeats_in_a_cluster() -> None:
    """After each event the accounts are compared with the agents' books, and no device lends beyond its cap."""
    one = cluster(4, 60, cap=0.6, stale=lambda: 500 * MS, beat_ms=10, gone_ms=2000, beat=10 * MS)
    for number in range(8):
        long(one, f"s{number}", 20, 60, at=(520 + 3 * number) * MS)
    most = Counter[str]()
    while one._heap:
        one.run_one()
        most |= one.scheduler.lending.loans.lent()
    one.expect()
    assert counters(one).loans > 0 and counters(one).pool_denials > 0
    assert max(most.values()) <= 36


@pytest.mark.parametrize("stale", [0, 500])
def test_sequences_that_need_each_others_pages_all_end(stale: int) -> None:
    """Each of two devices is full of a sequence that needs pages of the other one: one gives way.

    The other one learns of its pages half a second later, and has them before they are taken again.
    """
    one = cluster(3, 60, stale=lambda: stale * MS)
    for number in range(2):
        long(one, f"s{number}", 40, 130, at=(600 + number) * MS)
    one.run()
    one.expect()
    assert counters(one).preemptions <= 2 and one.now < 5000 * MS


def test_streams_go_on_while_no_manager_answers() -> None:
    """The managers are silent for three heartbeats: what needs no loan goes on, and the loan comes afterwards."""
    one = cluster(2, 60)
    one.at(50 * MS, lambda: one.muted.add(0))
    one.at(350 * MS, lambda: one.muted.discard(0))
    long(one, "a", 40, 60, at=60 * MS)
    for number in range(30):
        long(one, f"s{number}", 8, 8, at=(100 + 10 * number) * MS)
    one.run()
    one.expect()
    loans = [event.t for event in one.trace.named("kv.lend.start")]
    assert counters(one).pool_unanswered > 0 and loans and min(loans) > 350 * MS
    tokens = [event.t for event in one.trace.named("token") if 60 * MS < event.t < 350 * MS]
    assert max(later - earlier for earlier, later in pairwise(tokens)) < 20 * MS


def test_a_sequence_that_finds_no_creditor_is_not_computed_over_and_over() -> None:
    """No manager answers for 5 s: sequences keep their pages for some searches, then give way for a while."""
    one = cluster(2, 60)
    one.muted.add(0)
    one.at(5000 * MS, lambda: one.muted.discard(0))
    long(one, "a", 70, 30)
    long(one, "b", 70, 30, at=MS)
    one.run()
    one.expect()
    assert 1 <= counters(one).preemptions <= 6, "a restart for each pause at most"
    assert one.now < 7000 * MS


def test_managers_that_are_restarted_know_all_after_a_heartbeat() -> None:
    one = cluster(3, 60, managers=2)
    long(one, "a", 40, 130)
    long(one, "b", 40, 130, at=MS)
    for at in range(20, 200, 20):
        one.at(at * MS, lambda at=at: one.restart_manager(at // 20 % 2))
    one.run()
    one.expect()
    assert counters(one).loans > 0


def test_an_agent_without_heartbeats_is_left_alone() -> None:
    one = cluster(3, 60, beat_ms=10, gone_ms=50, beat=10 * MS)
    one.silent.add("d2")
    long(one, "a", 30, 60, at=60 * MS)
    one.run()
    one.expect()
    assert counters(one).loans > 0
    assert "d2" not in {each.device for each in one.answered[0].offers}


def test_at_rest_the_ledger_is_the_sum_of_the_books() -> None:
    """All sequences pause while loans stand; one heartbeat later managers, agents and scheduler agree (IL-11)."""
    one = cluster(4, 60)
    for number in range(3):
        long(one, f"s{number}", 60, 40, at=number * MS)
    seen: list[int] = []

    def compare() -> None:
        debts = dict(one.scheduler.lending.loans.debts())
        books = {(debtor, node.name): pages for node in one.living() for debtor, pages in node.agent.beat("").lent}
        assert debts == books == one.managers[0].ledger(one.now) and all(
            loan.standing for loan in one.scheduler.lending.loans
        )
        seen.append(sum(debts.values()))

    for number in range(3):
        one.at(40 * MS, lambda number=number: one.tell(PauseSequence(f"s{number}")))
        one.at(300 * MS, lambda number=number: one.tell(ResumeSequence(f"s{number}")))
    one.at(280 * MS, compare)
    one.run()
    one.expect()
    assert seen[0] > 0 and not one.managers[0].ledger(one.now)


def test_an_answer_that_comes_late_is_ignored() -> None:
    """A sequence is aborted while its query is under way; the answer finds nothing, and nothing is lent."""
    one = cluster(2, 60)
    long(one, "a", 40, 60)
    one.run(until=10 * MS)
    while not one.asked:
        one.run_one()
    one.abort("a", one.now)
    one.run()
    assert not one.trace.named("pool.offer") and not one.trace.named("kv.lend.start")
    one.expect_empty()


def test_nothing_is_asked_with_planned_loans() -> None:
    one = cluster(2, 60, mode="planned")
    long(one, "a", 90)
    one.run()
    one.expect()
    assert counters(one).loans > 0 and not one.asked and not counters(one).pool_queries


# -- all together ------------------------------------------------------------------------------------------------------


def test_a_log_with_negotiations_is_replayed(tmp_path: Path) -> None:
    one = cluster(3, 60, managers=2)
    with (tmp_path / "log").open("wb") as file:
        head = head_of([M.chain()], M.blocks(), one.scheduler._state.config)
        recorder = ReplayRecorder(one.scheduler, head, file.write)
        one.tell = lambda event: one.carry_out(recorder.handle(event, one.now))  # type: ignore[method-assign]
        long(one, "a", 120, 40)
        long(one, "b", 40, 60, at=MS)
        one.at(30 * MS, lambda: one.kill("d1"))
        one.run()
    one.expect()
    assert b'"PoolAnswer"' in (tmp_path / "log").read_bytes() and counters(one).loans > 0
    assert replay(tmp_path / "log") > 100


@pytest.mark.parametrize("victim", ["d0", "d1", "d2"])
def test_whatever_dies_every_token_comes_once(victim: str) -> None:
    for at in range(0, 140, 10):
        one = cluster(3, 60)
        long(one, "a", 120, 40)
        one.at(at * MS, lambda one=one: one.kill(victim))
        one.run()
        one.expect()
        assert not len(one.scheduler.lending.loans)
