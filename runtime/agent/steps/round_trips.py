"""Track rows that left a device and come back: how long a round trip takes, and when which rows are due.

Two kinds of round trips are measured, each only where it is used:

- `slots` (BL-22): if a block has a row limit of its own, every sequence that leaves keeps a slot for its return, until
  a deadline that follows from the mean round trip.
- `wait_limit`: rows of paths that begin and end here come back as soon as the scheduler has handled their token. A step
  may wait a moment for them (`policy.batching.batch_wait`). A round trip longer than the limit counts as the limit, and
  the row is not waited for. With limit 0 nothing is recorded.

Until one row has come back there is no mean, and no row counts as due. This module only measures.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.agent.sequences.sequence import QueuedRow
from runtime.policy.batching.step import Return, countdown

#: Weight of the latest value in a running mean.
_WEIGHT = 0.2


class RoundTrips:
    """Record rows that leave and return.

    Args:
        wait_limit: Longest round trip that a step waits for, in nanoseconds; 0 for none.
        slack: How much longer than the mean a round trip may take, as a share of it.
    """

    def __init__(self, wait_limit: int, slack: float) -> None:
        self.wait_limit = wait_limit
        #: Whether slots are kept: some block here has a row limit below that of a step.
        self.slots = False
        #: Mean duration of a step here, in nanoseconds.
        self.step = 0.0
        self._slack = slack
        self._returns: dict[str, tuple[int, Return]] = {}
        self._return_mean = 0.0
        self._due: dict[str, int] = {}
        self._due_mean = 0.0
        self._began = 0

    @property
    def due(self) -> int:
        """Rows that are due back from the scheduler."""
        return len(self._due)

    @property
    def records_returns(self) -> bool:
        """Whether `comes` has to be called for every row, for the slots."""
        return self.slots or bool(self._returns)

    @property
    def records_departures(self) -> bool:
        """Whether `leaves` has to be called for every row."""
        return self.slots or self.wait_limit > 0

    def leaves(self, row: QueuedRow, device: str, now: int) -> None:
        """Record that a row has run on `device` and goes on to another device or to the scheduler."""
        if self.slots and not row.shadow:
            self._returns[row.name] = now, Return(row.stage, countdown(now, int(self._return_mean), self._slack))
        path = row.sequence.path
        if self.wait_limit and row.hop + 1 == len(path) and path[0].device == device and not row.attempt:
            # The next row enters at the first hop, which may have another table than the last one.
            name = row.sequence.keys.get(path[0].lo, row.name)
            self._due.pop(name, None)
            self._due[name] = now

    def comes(self, name: str, now: int) -> None:
        """Record that a row has arrived. `name`: key of the page table at which it enters."""
        if self._returns and (left := self._returns.pop(name, None)) is not None:
            self._return_mean = _mean(self._return_mean, now - left[0])
        if self._due and (since := self._due.pop(name, None)) is not None:
            self._due_mean = _mean(self._due_mean, min(now - since, self.wait_limit))

    def remove_table(self, name: str) -> None:
        """Stop expecting rows at a table: its sequence has left the device."""
        self._returns.pop(name, None)
        self._due.pop(name, None)

    def expected(self) -> Sequence[Return]:
        """Return the sequences that are on their way back, for which slots are kept."""
        return [each for _, each in self._returns.values()]

    def begin_step(self, now: int) -> None:
        self._began = now

    def end_step(self, now: int) -> None:
        self.step = _mean(self.step, now - self._began)

    def deadline(self, now: int) -> int:
        """Return the time by which all rows due are expected, 0 if there are none. Rows over the limit are dropped."""
        latest = 0
        while self._due:
            first, left = next(iter(self._due.items()))
            if now - left < self.wait_limit:
                latest = next(reversed(self._due.values()))
                break
            del self._due[first]
            self._due_mean = _mean(self._due_mean, self.wait_limit)
        return latest + int(self._due_mean * (1 + self._slack)) if latest and self._due_mean else 0


def _mean(mean: float, value: int) -> float:
    return (1 - _WEIGHT) * mean + _WEIGHT * value if mean else float(value)
