"""Lent pages that come back while their sequence runs, and circles of debts (IL-23, IL-25)."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from runtime.messages import EndLoan
from tests.runtime.scheduler.lending.test_lending import cluster, prompt
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

END = 250 * MS


def two_that_share_a_device(**changes: Any) -> VirtualCluster:
    """A cluster where `a` lends while `b` runs beside it, and has room once `b` has ended."""
    one = cluster(2, 60, **changes)
    one.ticks(MS, END)
    one.ask(request("a", prompt(31), "m", max_tokens=27, ignore_eos=True))
    one.ask(request("b", prompt(30, 1), "m", max_tokens=12, ignore_eos=True))
    return one


def test_pages_come_back_once_there_is_room() -> None:
    one, never = two_that_share_a_device(), two_that_share_a_device(recall=1.0)
    for each in (one, never):
        each.run()
        each.expect()
        assert each.scheduler.state().counters.loans > 0
    counters = one.scheduler.state().counters
    back = one.trace.named("kv.recall")
    assert counters.loan_recalls == len(back) > 0 and not never.trace.named("kv.recall")
    assert counters.recalled_pages == sum(event.extra["pages"] for event in back)
    ends = [message for _, _, to, message in one.sent if isinstance(message, EndLoan) and to == "d1"]
    assert len(ends) == len(back) and counters.preemptions == 0


def test_parts_of_a_loan_come_back_in_whole_steps() -> None:
    """A creditor that needs its pages gives back as many as the debtor has room for, in steps of two page sets."""
    seen = 0
    for tokens, more in product((130, 150, 160), (50, 90)):
        one = cluster(2, 120, recall=1.0, circle_pages=0, cut_tokens=8)
        one.ask(request("a", prompt(tokens), "m", max_tokens=100, ignore_eos=True))
        for number in range(6):
            one.ask(
                request(f"b{number}", prompt(more, 1), "m", max_tokens=30, ignore_eos=True), at=(30 + 5 * number) * MS
            )
        one.run()
        one.expect()
        for first, last in (event.extra["groups"] for event in one.trace.named("kv.recall")):
            assert first % 2 == 0 or last - first < 2, (first, last)
            seen += first > 0 and last - first > 1
    assert seen > 2


def test_a_sequence_runs_on_while_its_pages_come_back() -> None:
    one = two_that_share_a_device()
    during = Counter[int]()
    while one._heap:
        one.run_one()
        for number in one.scheduler.lending.loans.recalls:
            during[number] = max(during[number], len(one.told["a"].tokens))
    began = {event.extra["recall"]: event.t for event in one.trace.named("kv.recall.start")}
    assert during and began.keys() == during.keys()


def test_a_creditor_that_needs_its_pages_gets_them_back_before_any_sequence_gives_way() -> None:
    one = two_that_share_a_device(recall=1.0)
    one.ask(request("c", prompt(72, 2), "m", max_tokens=8, ignore_eos=True), at=20 * MS)
    one.run()
    one.expect()
    counters = one.scheduler.state().counters
    assert counters.loan_recalls > 0 == counters.preemptions
    assert "c" not in {event.extra["seq"] for event in one.trace.named("kv.lend")}


@pytest.mark.parametrize("victim", ["d0", "d1"])
def test_deaths_and_aborts_while_pages_come_back(victim: str) -> None:
    plain = two_that_share_a_device()
    plain.run()
    begun = [event.t for event in plain.trace.named("kv.recall.start")]
    for at in sorted({time + shift for time in begun for shift in (0, MS // 10, MS // 3, MS // 2, MS)}):
        died = two_that_share_a_device()
        died.at(at, lambda died=died: died.kill(victim))
        died.run()
        died.expect()
        gone = two_that_share_a_device()
        gone.abort("a", at)
        gone.run()
        gone.expect_empty()


def test_a_recall_that_fails_leaves_the_loan() -> None:
    one = two_that_share_a_device(damage=lambda pages: pages.move in one.scheduler.lending.loans.recalls)
    one.run()
    one.expect()
    assert one.trace.named("kv.recall.none") and not one.scheduler.state().counters.loan_recalls
    assert one.scheduler.state().counters.preemptions == 0


def rivals(circle_pages: int) -> VirtualCluster:
    """Two devices with three sequences each that grow beyond them: each lends the other."""
    one = cluster(2, 90, recall=1.0, reclaim=False, circle_pages=circle_pages)
    one.ticks(MS, END)
    for number in range(6):
        one.ask(request(f"s{number}", prompt(30, number), "m", max_tokens=10 + 15 * number), at=number * MS)
    return one


def test_two_devices_that_hold_pages_for_each_other_take_their_own_back() -> None:
    found = {}
    for least in (0, 3):
        one, both = rivals(least), 0
        while one._heap:
            before, debts = one.now, one.scheduler.lending.loans.debts()
            one.run_one()
            both += (one.now - before) * min(debts.get(("d0", "d1"), 0), debts.get(("d1", "d0"), 0))
        one.expect()
        found[least] = both, one.scheduler.state().counters
    (without, off), (with_circles, on) = found[0], found[3]
    assert off.circles == off.loan_recalls == 0 < on.circles and on.recalled_pages > 0
    assert with_circles < without / 2, "the time for which both hold pages for each other"
