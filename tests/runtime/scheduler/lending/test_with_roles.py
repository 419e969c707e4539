"""Loans where prompts and decoding are apart: answers borrow, devices for prompts lend first, roles change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from runtime.control.scheduler_io import SetRoles
from runtime.role_config import RoleName
from tests.runtime.scheduler.anything import Anything
from tests.runtime.scheduler.lending.test_lending import cluster, prompt
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request


def apart(*roles: RoleName, pages: int = 60, **changes: Any) -> VirtualCluster:
    named = tuple((f"d{at}", role) for at, role in enumerate(roles))
    return cluster(len(roles), pages, settings={"roles": named}, **changes)


def test_answers_borrow_where_they_decode_and_devices_for_prompts_lend_first() -> None:
    one = apart("prefill", "decode", "decode")
    one.ask(request("a", prompt(40), "m", max_tokens=80, ignore_eos=True))
    one.run()
    one.expect()
    loans = one.trace.named("kv.lend")
    decodes = {event.extra["debtor"] for event in loans}
    assert loans and decodes < {"d1", "d2"} and {event.dev for event in loans} == {"d0"}
    assert one.scheduler.state().counters.handoffs == 1


def test_prompts_borrow_nothing() -> None:
    one = apart("prefill", "decode", "decode")
    one.ask(request("a", prompt(100), "m", max_tokens=4))
    one.run()
    assert one.told["a"].last.error == "its 100 tokens need 78 pages on d0, which has 60"


def test_a_role_that_changes_while_its_device_borrows() -> None:
    """The composition of a flip and loans: answers go on where they are, with what they have borrowed."""
    lent = list[int]()
    for at in range(60, 100, 7):
        one = apart("prefill", "decode", "decode")
        for number in range(3):
            one.ask(
                request(f"s{number}", prompt(30 + number), "m", max_tokens=60, ignore_eos=True), at=number * 20 * MS
            )
        one.at(at * MS, lambda one=one: _flip(one, lent))
        one.run()
        one.expect()
    assert sum(lent) > 2, "loans that stood then"


def _flip(one: VirtualCluster, lent: list[int]) -> None:
    lent.append(len(one.scheduler.lending.loans))
    one.tell(SetRoles((("d1", "prefill"), ("d0", "decode"))))


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_with_roles_and_loans(seed: int) -> None:
    one = Anything(seed=seed, lends=True, apart=True)
    one.run()
    one.expect_end()


def test_schedules_with_roles_and_loans_have_both() -> None:
    seen: Counter[str] = Counter()
    for seed in range(30, 46):
        one = Anything(seed=seed, lends=True, apart=True)
        one.run()
        one.expect_end()
        counters = one.scheduler.state().counters
        seen["loans"] += counters.loans
        seen["handoffs"] += counters.handoffs
    assert min(seen.values()) > 0 and len(seen) == 2, seen
