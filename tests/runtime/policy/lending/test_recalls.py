"""Which loans come back: whole parts, the least first, while a share of the debtor's pages stays free (IL-25)."""

from __future__ import annotations

from runtime.policy.lending.recalls import Debt, recalls


def test_the_least_part_comes_back_first_and_only_as_a_whole() -> None:
    debts = [Debt(1, "a", "d0", "d1", 6), Debt(2, "a", "d0", "d1", 6), Debt(3, "b", "d0", "d2", 5)]
    assert recalls(debts, {"d0": 4}) == []
    assert recalls(debts, {"d0": 11}) == [3]
    assert recalls(debts, {"d0": 16}) == [3], "one of two loans at a creditor saves no round trip"
    assert recalls(debts, {"d0": 17}) == [3, 1, 2]


def test_each_debtor_has_room_of_its_own() -> None:
    debts = [Debt(1, "a", "d0", "d1", 6), Debt(2, "b", "d1", "d0", 6), Debt(3, "c", "d2", "d0", 1)]
    assert recalls(debts, {"d0": 6, "d1": 5}) == [1]
