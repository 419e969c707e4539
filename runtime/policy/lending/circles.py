"""Find circles of debts: devices of which each holds pages for the one before it (IL-19 to IL-24).

    A owes B, B owes C, C owes A: each can have `pages` of its own back in the place of as many that it holds, and no
    device needs more memory than it has

The paper's Algorithm 1 is for undirected graphs: it misses A <-> B and finds circles where there are none
(`docs/papers.md`). Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

#: Pages by (debtor, creditor).
Debts = Mapping[tuple[str, str], int]


class Circle(NamedTuple):
    """A circle of debts.

    Fields:
        edges: (debtor, creditor) of each debt; each creditor is the next one's debtor.
        pages: The least of these debts.
    """

    edges: tuple[tuple[str, str], ...]
    pages: int


def circle(debts: Debts, least: int = 1) -> Circle | None:
    """Return a circle of debts of at least `least` pages each (IL-21), or None.

    A depth-first search without recursion: a debt to a device on the way from the start closes a circle (IL-20).
    """
    owes: defaultdict[str, list[str]] = defaultdict(list)
    for (debtor, creditor), pages in sorted(debts.items()):
        if pages >= max(1, least) and debtor != creditor:
            owes[debtor].append(creditor)
    done = set[str]()
    for start in sorted(owes):
        way, rest = [start], [iter(owes[start])]
        while way:
            step = next(rest[-1], None)
            if step is None:
                done.add(way.pop())
                rest.pop()
            elif step in way:
                nodes = way[way.index(step) :]
                edges = tuple(zip(nodes, (*nodes[1:], nodes[0]), strict=True))
                return Circle(edges, min(debts[edge] for edge in edges))
            elif step not in done:
                way.append(step)
                rest.append(iter(owes.get(step, ())))
    return None


def without(debts: Debts, found: Circle, pages: int) -> dict[tuple[str, str], int]:
    """Return the debts after so many pages of each debt of a circle have come back."""
    left = {edge: owed - pages * (edge in found.edges) for edge, owed in debts.items()}
    return {edge: owed for edge, owed in left.items() if owed}
