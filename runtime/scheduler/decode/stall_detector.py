"""Rows and moves that no device has any more: every wait of a sequence has a limit, and none of them guesses how long
work takes.

A device says in its reports how many rows wait there and how many steps it has run. It is *still* from the report on in
which nothing waits and no step has been run since the one before, until a report says otherwise. Whoever waits for a
row, or for a move's answer, while all devices that could have it are still waits for what was dropped on the way, or
for what will never come.

Contract: `report` is told of every report, `gone` of devices that died. `look`, once per tick, gives back those who
have waited for the
limit: reports that so much later say that nothing has been done since. So a step may take as long as it takes (a device
that works reports nothing, or a step), and a device that is dead is not this part's affair. Pages on their way are no
steps, so moves have ten times as long. It decides nothing, and remembers nothing of whoever does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from runtime.scheduler.sequences.sequence import ScheduledSequence

#: What changes when a sequence gets on: epoch, tokens computed, the latest turn, whether a row is under way, the move.
_Marks = tuple[int, int, int, bool, int]
#: How much longer than rows moves may take.
MOVES = 10


@dataclass(slots=True)
class _Still:
    """By reports: nothing has been done since then, up to then."""

    since: int
    upto: int


class StallDetector:
    """`limit`: nanoseconds; 0: nobody is ever overdue."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._still: dict[str, _Still] = {}
        self._seen: dict[str, tuple[_Marks, int]] = {}

    def report(self, device: str, idle: bool, now: int) -> None:
        """`idle`: nothing waits there, and no step has been run since the last report."""
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
        target: Callable[[ScheduledSequence], str | None],
        now: int,
    ) -> list[ScheduledSequence]:
        """Those who have waited too long.

        Args:
            here: the sequences whose paths pass a device.
            target: where the move goes that a sequence is in, if it is in one.
        """
        seen: dict[str, tuple[_Marks, int]] = {}
        late: list[ScheduledSequence] = []
        for sequence in (sequence for device in self._still for sequence in here(device)) if self._limit else ():
            if sequence.seq in seen or not (sequence.flying or sequence.waits.move):
                continue
            goes = target(sequence)
            could = [
                self._still.get(name)
                for name in (*sequence.place.devices, *sequence.offered.devices, *(() if goes is None else (goes,)))
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
