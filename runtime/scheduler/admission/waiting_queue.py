"""Keep waiting sequences in one queue per chain, so that a sequence that does not fit holds back its own chain only.

Contract: each queue is in rank order; with an order by deadline, it is kept by group. A paused sequence is kept aside:
it is never first, and holds nothing back. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.control.sequence import Rank, RankedQueue
from runtime.scheduler.order.forecasts import Forecasts
from runtime.scheduler.order.grouped_queue import GroupedQueue
from runtime.scheduler.residency.turns import ModelTurns
from runtime.scheduler.sequences.sequence import ScheduledSequence


class WaitingQueue:
    """Waiting sequences, by version of their chain. Its length does not count paused ones.

    Args:
        forecasts: Holds their groups, where the order is by deadline.
        turns: The turns of models that do not fit together; within a priority they come before all else.
    """

    def __init__(self, forecasts: Forecasts | None = None, turns: ModelTurns | None = None) -> None:
        self._forecasts, self.turns = forecasts, turns or ModelTurns(0)
        self._queues: dict[str, RankedQueue[ScheduledSequence] | GroupedQueue] = {}
        self._aside: dict[str, ScheduledSequence] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ScheduledSequence]:
        """Iterate over all sequences, chain by chain, then over the paused ones."""
        yield from (sequence for queue in self._queues.values() for sequence in queue)
        yield from self._aside.values()

    def add(self, sequence: ScheduledSequence) -> None:
        if sequence.waits.paused is not None:
            self._aside[sequence.seq] = sequence
            return
        queue = self._queues.get(sequence.chain.version)
        if queue is None:
            version, groups = sequence.chain.version, self._forecasts
            queue = self._queues[version] = RankedQueue() if groups is None else GroupedQueue(version, groups)
        queue.add(sequence)
        self._count += 1

    def remove(self, sequence: ScheduledSequence) -> None:
        """Remove a sequence. Raises KeyError if it is not here."""
        if self._aside.pop(sequence.seq, None) is not None:
            return
        queue = self._queues[sequence.chain.version]
        queue.remove(sequence)
        self._count -= 1
        if not len(queue):
            del self._queues[sequence.chain.version]

    def rerank(self, sequence: ScheduledSequence, rank: Rank) -> None:
        """Give a waiting sequence another rank."""
        self.remove(sequence)
        sequence.rank = rank
        self.add(sequence)

    def cell(self, sequence: ScheduledSequence) -> str:
        """Return the cell of a waiting sequence; empty where there are none."""
        return "" if self._forecasts is None else self._forecasts.cell(sequence)

    def after(self, sequence: ScheduledSequence, cell: str) -> ScheduledSequence | None:
        """Return the first sequence of a chain in the `cell` that one was in before it left; None if none waits."""
        queue = self._queues.get(sequence.chain.version)
        if queue is None:
            return None
        return queue.first_in(cell) if isinstance(queue, GroupedQueue) else queue.first()

    def heads(self) -> list[ScheduledSequence]:
        """Return the first sequence of each chain, and of each cell where there are any, in rank order."""
        found: list[ScheduledSequence] = []
        for queue in self._queues.values():
            found += queue.firsts() if isinstance(queue, GroupedQueue) else (queue.first(),)
        return sorted(found, key=self.rank)

    def rank(self, sequence: ScheduledSequence) -> tuple[int, ...]:
        """Return where a sequence, which may run already, stands among all."""
        if self.turns.on:
            priority, *rest = self._ranked(sequence)
            return (priority, self.turns.place(sequence.chain.loaded_as), *rest)
        return self._ranked(sequence)

    def _ranked(self, sequence: ScheduledSequence) -> tuple[int, ...]:
        return sequence.rank if self._forecasts is None else self._forecasts.rank(sequence)

    def count(self, version: str) -> int:
        """Return how many sequences of a chain wait; paused ones are not counted."""
        return len(self._queues.get(version, ()))

    def by_chain(self) -> dict[str, int]:
        """Return how many sequences wait, by version of their chain; paused ones are not counted."""
        return {version: len(queue) for version, queue in self._queues.items()}
