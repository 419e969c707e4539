"""Circles of debts: found exactly where there are some, and gone after as many swaps (IL-19 to IL-24)."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations, product

import pytest

from runtime.policy.lending.circles import Circle, circle, without

#: The paper's Figure 4: (debtor, creditor). Its ledger has no circle; its Algorithm 1 reports one.
FIGURE_4 = {("1", "0"): 8, ("3", "0"): 8, ("1", "3"): 8}


def has_circle(edges: set[tuple[str, str]]) -> bool:
    """Return whether a graph has a circle, by taking away nodes without debts."""
    left = set(edges)
    while True:
        owing = {debtor for debtor, _ in left}
        kept = {(debtor, creditor) for debtor, creditor in left if creditor in owing}
        if kept == left:
            return bool(left)
        left = kept


def is_one(debts: dict[tuple[str, str], int], found: Circle) -> bool:
    """Return whether a circle is made of these debts, passes no device twice, and names the least of them."""
    debtors = [debtor for debtor, _ in found.edges]
    follows = [creditor for _, creditor in found.edges] == [*debtors[1:], debtors[0]]
    return (
        follows
        and len(set(debtors)) == len(debtors)
        and all(edge in debts for edge in found.edges)
        and found.pages == min(debts[edge] for edge in found.edges)
    )


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_every_graph_of_few_devices(nodes: int) -> None:
    pairs = list(permutations("abcd"[:nodes], 2))
    for owed in product((0, 1), repeat=len(pairs)):
        debts = {pair: 3 for pair, there in zip(pairs, owed, strict=True) if there}
        found = circle(debts)
        assert (found is not None) == has_circle(set(debts)), debts
        assert found is None or is_one(debts, found)


def test_two_devices_and_the_papers_figure() -> None:
    assert circle({("a", "b"): 5, ("b", "a"): 2}) == Circle((("a", "b"), ("b", "a")), 2)
    assert circle(FIGURE_4) is None
    assert circle({("0", "1"): 1, ("1", "2"): 1, ("0", "2"): 1}) is None
    assert circle({("0", "1"): 1, ("0", "2"): 1, ("1", "3"): 1, ("2", "3"): 1}) is None


def test_below_the_threshold_nothing_is_done() -> None:
    debts = {("a", "b"): 9, ("b", "c"): 7, ("c", "a"): 8}
    assert circle(debts, 8) is None
    found = circle(debts, 7)
    assert found is not None and found.pages == 7


def test_ledgers_of_up_to_12_devices_end_without_circles() -> None:
    """10,000 random ledgers: each swap takes a debt away, and no device holds or owes another sum than before."""
    rng, swaps = random.Random(4), 0
    for _ in range(10_000):
        names, least = [f"d{at}" for at in range(rng.randint(2, 12))], rng.randint(1, 12)
        density = rng.random() / 2
        pairs = [pair for pair in permutations(names, 2) if rng.random() < density]
        debts = {pair: rng.randint(1, 40) for pair in pairs}
        while (found := circle(debts, least)) is not None:
            assert is_one(debts, found) and found.pages >= least
            after = without(debts, found, found.pages)
            assert len(after) < len(debts) and net(after) == net(debts)
            debts, swaps = after, swaps + 1
        assert not has_circle({pair for pair, pages in debts.items() if pages >= least})
    assert swaps > 10_000


def net(debts: dict[tuple[str, str], int]) -> Counter[str]:
    """Return what each device lends less what it borrows, in pages."""
    pages: Counter[str] = Counter()
    for (debtor, creditor), owed in debts.items():
        pages[creditor] += owed
        pages[debtor] -= owed
    return Counter({name: owed for name, owed in pages.items() if owed})
