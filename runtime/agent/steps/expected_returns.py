"""Sequences that went on from a device and are expected back: the countdowns for which slots are kept (BL-22).

Contract: `matter` says whether anybody asks: where no block has a limit of its own there is no slot to keep, and
nothing is written down. How long a round takes is learnt from those that came back.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.agent.sequences.sequence import QueuedRow
from runtime.policy.batching.step import Return, countdown

#: Weight of the latest round trip in the mean.
_WEIGHT = 0.2


class ExpectedReturns:
    def __init__(self, slack: float) -> None:
        self.matter = False
        self._slack = slack
        self._left: dict[str, tuple[int, Return]] = {}
        self._round = 0.0

    @property
    def listens(self) -> bool:
        """Whether it has to hear of rows that come."""
        return self.matter or bool(self._left)

    def leaves(self, row: QueuedRow, now: int) -> None:
        """A row is through here; its sequence will come again."""
        if self.matter:
            self._left[row.name] = now, Return(row.stage, countdown(now, int(self._round), self._slack))

    def comes(self, name: str, now: int) -> None:
        left = self._left.pop(name, None)
        if left is not None:
            took = now - left[0]
            self._round = took if not self._round else (1 - _WEIGHT) * self._round + _WEIGHT * took

    def remove_device(self, name: str) -> None:
        self._left.pop(name, None)

    def expected(self) -> Sequence[Return]:
        return [each for _, each in self._left.values()]
