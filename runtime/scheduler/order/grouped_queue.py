"""Keep the waiting sequences of a chain by group, so that a plan moves groups, not sequences (QL-04)."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.scheduler.order.forecasts import Forecasts
from runtime.scheduler.sequences.sequence import ScheduledSequence


class GroupedQueue:
    """Waiting sequences of one version of a chain, in the order of their groups; see `policy.slo.groups` for costs."""

    def __init__(self, version: str, forecasts: Forecasts) -> None:
        self._version, self._forecasts = version, forecasts
        self._sequences: dict[str, ScheduledSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        groups = self._forecasts.groups.of_chain(self._version)
        return (self._sequences[member.seq] for group in groups for member in group)

    def firsts(self) -> list[ScheduledSequence]:
        """Return the first sequence of each cell."""
        return [self._sequences[member.seq] for member in self._forecasts.groups.firsts(self._version)]

    def first_in(self, cell: str) -> ScheduledSequence | None:
        """Return the first sequence of a cell, None if there is none."""
        member = self._forecasts.groups.first(self._version, cell)
        return None if member is None else self._sequences[member.seq]

    def add(self, live: ScheduledSequence) -> None:
        self._forecasts.add_waiting(live)
        self._sequences[live.seq] = live

    def remove(self, live: ScheduledSequence) -> None:
        """Remove a sequence. Raises KeyError if it is not in the queue."""
        del self._sequences[live.seq]
        self._forecasts.remove_waiting(live)
