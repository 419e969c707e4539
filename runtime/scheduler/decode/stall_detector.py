"""Detect rows and migrations that no device has any more, so that every wait of a sequence has a limit.

A device reports how many rows wait there and how many steps it has run. It is *still* from the first report in which
nothing waits and no step was run since the report before, until a report shows otherwise. A sequence that waits for a
row, or for a migration's answer, while all devices that could have it are still, waits for something that was lost.

Contract:
- `report` is called with every report, `remove_device` with devices that died, `look` once per tick.
- `look` returns sequences that have waited for the limit, measured between reports. A step may therefore take any time:
  a device at work sends no report, or reports a step. Dead devices are handled elsewhere.
- Sending pages does not count as a step, so migrations have `MOVES` times as long.
- It decides nothing, and keeps no record of sequences that do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from runtime.scheduler.sequences.sequence import ScheduledSequence

#: Changes when a sequence makes progress: epoch, tokens computed, attempt, whether a row is in flight, migration.
_Marks = tuple[int, int, int, bool, int]
#: Limit of migrations, in limits of rows.
MOVES = 10


@dataclass(slots=True)
class _Still:
    """Interval between two reports, in ns, in which a device did nothing."""

    since: int
    upto: int


class StallDetector:
    """Find sequences that wait for a lost row or migration. `limit`: ns; 0: no limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._still: dict[str, _Still] = {}
        self._seen: dict[str, tuple[_Marks, int]] = {}

    def report(self, device: str, idle: bool, now: int) -> None:
        """Record a report of a device. `idle`: nothing waits there, and no step was run since the last report."""
        if not idle:
            self._still.pop(device, None)
        elif device in self._still:
            self._still[device].upto = now
        else:
            self._still[device] = _Still(now, now)

    def remove_device(self, device: str) -> None:
        self._still.pop(device, None)

    def look(
        self,
        here: Callable[[str], Iterable[ScheduledSequence]],
        targets: Callable[[ScheduledSequence], Sequence[str]],
        now: int,
    ) -> list[ScheduledSequence]:
        """Return the sequences that have waited longer than the limit.

        Args:
            here: Returns the sequences with a path over a device.
            targets: Returns the destinations of a sequence's migration.
            now: Time in ns.
        """
        seen: dict[str, tuple[_Marks, int]] = {}
        late: list[ScheduledSequence] = []
        for sequence in (sequence for device in self._still for sequence in here(device)) if self._limit else ():
            if sequence.seq in seen or not (sequence.flying or sequence.waits.move):
                continue
            could = [
                self._still.get(name)
                for name in (*sequence.place.devices, *sequence.offered.devices, *targets(sequence))
            ]
            still = [each for each in could if each is not None]
            if len(still) < len(could):
                continue
            marks = (sequence.epoch, sequence.computed, sequence.attempt, sequence.flying, sequence.waits.move)
            known = self._seen.get(sequence.seq)
            since = known[1] if known is not None and known[0] == marks else now
            seen[sequence.seq] = marks, since
            limit = self._limit if sequence.flying else MOVES * self._limit
            if min(each.upto for each in still) - max(since, *(each.since for each in still)) >= limit:
                late.append(sequence)
        self._seen = seen
        return late
