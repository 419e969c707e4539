"""Choose the loans of which K and V come back to their debtor while the sequence runs (IL-25).

A loan costs its sequence a round trip for each layer and step, so what fits comes back: all that one device holds of a
sequence, the least first, while a share of the debtor's pages stays free. That share keeps it from lending the same
pages again at once. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Debt(NamedTuple):
    """Pages of one loan that can come back now."""

    loan: int
    seq: str
    debtor: str
    creditor: str
    pages: int


def recalls(debts: Iterable[Debt], room: Mapping[str, int]) -> list[int]:
    """Return the numbers of the loans that come back, in this order.

    `room`: pages that each debtor can take back, the share that stays free aside.
    """
    parts: defaultdict[tuple[str, str, str], list[Debt]] = defaultdict(list)
    for debt in debts:
        parts[debt.seq, debt.debtor, debt.creditor].append(debt)
    left, chosen = dict(room), list[int]()
    for (_, debtor, _), part in sorted(parts.items(), key=lambda item: (sum(each.pages for each in item[1]), item[0])):
        pages = sum(each.pages for each in part)
        if pages <= left.get(debtor, 0):
            left[debtor] -= pages
            chosen += [each.loan for each in part]
    return chosen
