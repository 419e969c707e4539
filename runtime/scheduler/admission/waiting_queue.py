"""Keep waiting sequences in one queue per chain, so that a sequence that does not fit holds back its own chain only.

Contract: each queue is in rank order; `heads` gives the chains by the rank of their first sequence. A paused sequence
stands aside: it is never first, and holds nothing back. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.control.sequence import RankedQueue
from runtime.scheduler.sequences.sequence import ScheduledSequence


class WaitingQueue:
    def __init__(self) -> None:
        self._queues: dict[str, RankedQueue[ScheduledSequence]] = {}
        self._aside: dict[str, ScheduledSequence] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ScheduledSequence]:
        """All of them, chain by chain, and then whoever stands aside."""
        yield from (sequence for queue in self._queues.values() for sequence in queue)
        yield from self._aside.values()

    def add(self, sequence: ScheduledSequence) -> None:
        if sequence.waits.paused is not None:
            self._aside[sequence.seq] = sequence
            return
        queue = self._queues.get(sequence.chain.version)
        if queue is None:
            queue = self._queues[sequence.chain.version] = RankedQueue()
        queue.add(sequence)
        self._count += 1

    def remove(self, sequence: ScheduledSequence) -> None:
        """Raises KeyError if it does not wait."""
        if self._aside.pop(sequence.seq, None) is not None:
            return
        queue = self._queues[sequence.chain.version]
        queue.remove(sequence)
        self._count -= 1
        if not len(queue):
            del self._queues[sequence.chain.version]

    def first(self, version: str) -> ScheduledSequence | None:
        """Who of a chain is next."""
        queue = self._queues.get(version)
        return None if queue is None else queue.head(1)[0]

    def heads(self) -> list[ScheduledSequence]:
        """The first of each chain, in rank order."""
        return sorted((queue.head(1)[0] for queue in self._queues.values()), key=lambda sequence: sequence.rank)

    def count(self, version: str) -> int:
        """How many wait for a chain."""
        return len(self._queues.get(version, ()))

    def by_chain(self) -> dict[str, int]:
        """How many wait, by chain."""
        return {version: len(queue) for version, queue in self._queues.items()}
