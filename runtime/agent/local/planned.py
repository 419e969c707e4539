"""A sequence of which rows may be under way while the next step is planned, and the steps that are.

Contract: what `LiveSequence` says of a sequence is what its results have told. A `PlannedSequence` adds what its rows
under way will have
come to once they are back: `ahead` tokens more with K and V, `pending` tokens more whose ids only the engine has. Plans
are made from the sum of both, so with nothing under way they are what they would be without looking ahead. Decides
nothing, and knows no pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.control.sequence import LiveSequence
from runtime.policy.batching.continuous import SequenceView
from runtime.types import Row, StepPlan


@dataclass(slots=True, eq=False)
class PlannedSequence(LiveSequence):
    """See the top of the file. `rows`: how many of its rows are under way."""

    rows: int = 0
    ahead: int = 0
    pending: int = 0

    def view(self, groups: int) -> SequenceView:
        """As it will be once its rows under way are back."""
        phase = "decode" if self.pending else self.phase
        return SequenceView(
            self.request.seq, self.spec, self.tokens + self.pending, self.computed + self.ahead, groups, phase
        )

    @property
    def concluding(self) -> bool:
        """Whether it ends with its rows under way, whatever their tokens are: nothing more is to be run of it."""
        if not self.rows:
            return False
        if not self.samples:
            return self.computed + self.ahead >= self.tokens
        made = len(self.output) + self.pending
        return self.pending > 0 and (
            made >= self.request.sampling.max_tokens or self.length + self.pending >= self.spec.max_model_len
        )

    def row(self, count: int, new_pages: tuple[tuple[int, ...], ...]) -> Row:
        """Its next `count` tokens, which set out with this. The one that is pending, if one is, is the last that there
        can be.
        """
        start = self.computed + self.ahead
        tokens = (0,) if self.pending else self.span(count, self.ahead)
        sample = self.samples and start + count == self.tokens + self.pending
        made = len(self.output) + self.pending
        row = Row(self.request.seq, self.spec.name, tokens, start, new_pages, sample, made, self.pending > 0)
        self.rows += 1
        self.ahead += count
        self.pending += sample
        return row

    def back(self, row: Row) -> None:
        """One of its rows is under way no more."""
        self.rows -= 1
        self.ahead -= len(row.tokens)
        self.pending -= row.sample

    def alone(self) -> None:
        """None of its rows will ever come back."""
        self.rows = self.ahead = self.pending = 0


class UnderWay:
    """Steps that were planned and of which nothing has been heard, oldest first: `most` of them."""

    def __init__(self, most: int) -> None:
        self._plans: deque[StepPlan] = deque()
        self._most = most

    def __len__(self) -> int:
        return len(self._plans)

    def require_room(self) -> None:
        """Raises RuntimeError where as many are under way as may be."""
        if len(self._plans) >= self._most:
            raise RuntimeError(f"step {self._plans[0].step} is still under way")

    def add(self, plan: StepPlan) -> StepPlan:
        self._plans.append(plan)
        return plan

    @property
    def oldest(self) -> StepPlan:
        """The one that is heard of next. Raises RuntimeError when there is none."""
        if not self._plans:
            raise RuntimeError("no step is under way")
        return self._plans[0]

    def take(self) -> StepPlan:
        """The oldest, which is over. Raises RuntimeError when there is none."""
        plan = self.oldest
        self._plans.popleft()
        return plan

    def unopened(self, names: Iterable[str]) -> list[str]:
        """Those of these names that no step under way has given to somebody new."""
        opened = {one.request.seq for plan in self._plans for one in plan.opened}
        return [name for name in names if name not in opened]

    def clear(self) -> None:
        self._plans.clear()
