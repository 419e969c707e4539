"""Rows that left a device for the scheduler alone and are due back: how many, by when, and how long such a round lately
takes.

Contract: a round is learnt from rows that came back; one that takes longer than `limit` counts as that, and is not
waited for. Until one has come back nobody is expected. `limit` 0 switches it off, and nothing is written down. Decides
nothing (`policy.batching.batch_wait` does); it knows no messages.
"""

from __future__ import annotations

from runtime.agent.sequences.sequence import QueuedRow

#: Weight of the latest round trip, and of the latest step, in their means.
_WEIGHT = 0.2


class RoundTrips:
    """`limit`: nanoseconds; `slack`: how much longer than usually a round may take, as a share of it."""

    def __init__(self, limit: int, slack: float) -> None:
        self.limit = limit
        self._slack = slack
        self._left: dict[str, int] = {}
        self._round = 0.0
        self._began = 0
        #: How long a step takes here lately.
        self.step = 0.0

    def __len__(self) -> int:
        return len(self._left)

    def leaves(self, row: QueuedRow, device: str, now: int) -> None:
        """A row is through here. It is due back if nobody but the scheduler has it meanwhile: here its path ends, and
        begins again.
        """
        path = row.sequence.path
        if self.limit and row.hop + 1 == len(path) and path[0].device == device and not row.attempt:
            name = row.sequence.keys.get(
                path[0].lo, row.name
            )  # its next row comes in at the first hop, which may be another than the last
            self._left.pop(name, None)
            self._left[name] = now

    def comes(self, name: str, now: int) -> None:
        """`name`: of the table that a row enters at."""
        if self._left:
            left = self._left.pop(name, None)
            if left is not None:
                self._learn(min(now - left, self.limit))

    def remove_device(self, name: str) -> None:
        self._left.pop(name, None)

    def begins(self, now: int) -> None:
        """A step."""
        self._began = now

    def end_step(self, now: int) -> None:
        """It is over."""
        took = now - self._began
        self.step = float(took) if not self.step else (1 - _WEIGHT) * self.step + _WEIGHT * took

    def deadline(self, now: int) -> int:
        """By when the last of them is expected; those that have not come within the limit are not any more."""
        latest = 0
        while self._left:
            first, left = next(iter(self._left.items()))
            if now - left < self.limit:
                latest = next(reversed(self._left.values()))
                break
            del self._left[first]
            self._learn(self.limit)
        return latest + int(self._round * (1 + self._slack)) if latest and self._round else 0

    def _learn(self, took: int) -> None:
        self._round = float(took) if not self._round else (1 - _WEIGHT) * self._round + _WEIGHT * took
