"""Resolve circles of debts: devices that hold pages for one another take back as many of their own (IL-19 to IL-24).

    find (policy.lending.circles) -> in the order of devices: recall of what the device has room for
        -> its pages are back: as many are free at its creditor, the next one of the circle -> that one's recall …
        -> each debt of the circle has come back by as much: the next circle

Contract:
- No device needs more pages than it has: what one takes back is free at the next one. The circle starts with the pages
  that are free on any of its devices, one page set at least (IL-23).
- Amounts are those of the account at each recall, not those with which the circle was found: a sequence that ends or
  dies meanwhile takes its debt along (IL-22).
- Sequences run on while their pages come back; an abort ends a recall at once.
- A circle in which nothing moves any more, or that takes too long, is given up: what came back stays, the rest is lent
  as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.policy.lending.circles import Circle, circle
from runtime.scheduler.lending.loans import Loan, LoanRecall, Loans
from runtime.scheduler.lending.recalls import Recalls
from runtime.scheduler.state import ClusterState

#: Time in ns after which a circle is given up, and before the next one is looked for then.
_LEASE, _PAUSE = 10_000_000_000, 1_000_000_000


@dataclass(slots=True)
class CircleUnderWay:
    """A circle that is being resolved.

    Fields:
        left: Pages of each debt, by (debtor, creditor), that are still to come back.
        recalls: Numbers of its recalls under way.
    """

    found: Circle
    began: int
    left: dict[tuple[str, str], int]
    recalls: set[int] = field(default_factory=set)


class Circles:
    """Find circles, and resolve one at a time."""

    def __init__(self, state: ClusterState, loans: Loans, recalls: Recalls) -> None:
        self._state, self._loans, self._recalls = state, loans, recalls
        self._now: CircleUnderWay | None = None
        self._paused = 0
        recalls.on_commit = self._came_back

    def review(self, now: int) -> None:
        """Look for a circle, or go on with the one that is being resolved."""
        least = self._state.config.lending.circle_pages
        if self._now is None and least and now >= self._paused and len(self._loans) > 1:
            found = circle(self._loans.debts(), least)
            if found is None:
                return
            self._now = CircleUnderWay(found, now, dict.fromkeys(found.edges, found.pages))
            self._trace("kv.circle", self._now, now, pages=found.pages)
        if self._now is not None:
            self._go_on(self._now, now)

    # -- internals -----------------------------------------------------------------------------------------------------

    def _came_back(self, recall: LoanRecall, now: int) -> None:
        """Take the next step once pages of the circle are back, before anything else takes those that are free now."""
        one = self._now
        if one is None or recall.number not in one.recalls:
            return
        one.recalls.discard(recall.number)
        one.left[recall.loan.debtor, recall.loan.creditor] -= recall.pages
        self._go_on(one, now)

    def _go_on(self, one: CircleUnderWay, now: int) -> None:
        one.recalls &= self._loans.recalls.keys()
        late = now - one.began > _LEASE
        for edge in sorted(one.left) if not late else ():
            if not any(self._edge(number) == edge for number in one.recalls):
                self._start(one, edge, now)
        if late or not one.recalls:
            moved = sum(one.found.pages - left for left in one.left.values())
            self._state.counters.circles += 1
            self._trace("kv.circle.end", one, now, moved=moved)
            self._now, self._paused = None, now + (_PAUSE if late or not moved else 0)

    def _start(self, one: CircleUnderWay, edge: tuple[str, str], now: int) -> None:
        """Start one recall of a debt of the circle: of the loan that lets the most come back."""
        able = [
            each for each in self._loans if (each.debtor, each.creditor) == edge and self._recalls.is_able(each, now)
        ]
        best = max(able, key=lambda each: (self._groups(one, each) * each.depth, -each.number), default=None)
        if best is not None and (groups := self._groups(one, best)):
            recall = self._recalls.start(best, groups, now)
            if recall is not None:
                one.recalls.add(recall.number)

    def _groups(self, one: CircleUnderWay, loan: Loan) -> int:
        """Return how many page sets of a loan may come back now."""
        pages = min(one.left[loan.debtor, loan.creditor], self._recalls.room(loan.debtor))
        return max(0, min(loan.groups[1] - loan.groups[0], pages // loan.depth))

    def _edge(self, number: int) -> tuple[str, str]:
        loan = self._loans.recalls[number].loan
        return loan.debtor, loan.creditor

    def _trace(self, event: str, one: CircleUnderWay, now: int, **extra: int) -> None:
        nodes = [debtor for debtor, _ in one.found.edges]
        self._state.tell.control(now, event, "IL-23", nodes[0], "", devices=nodes, **extra)
