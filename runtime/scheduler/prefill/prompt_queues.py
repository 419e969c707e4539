"""Queue the prompts on each path, and run them in chunks of one size over several requests (TI-05 to TI-08).

    a sequence is to compute its prompt -> `add` -> raw queue -> a window of it is sorted -> scheduled queue
    `run` -> the next chunk: rows of scheduled prompts, until it is full -> all of its rows go out together

Contract:
- A path has one chunk under way for each of its hops.
- At most one row of a sequence is in flight. A prompt with a row in flight, on a path of several hops, is left out of a
  chunk, and so is one for which there are no pages; the prompts behind it are not.
- A sequence that is computed again after it gave way queues like a new one (UN-17).

`policy.prefill.prompt_order` sorts and cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from runtime.policy.prefill.prompt_order import PromptJob, PromptOrder, assemble, next_window
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: A row that was issued: its sequence, with epoch and computed tokens before it.
_Issued = tuple[ScheduledSequence, int, int]


@dataclass(slots=True)
class _PathQueue:
    """The prompts of one path, by name with their epochs. `under_way`: chunks of which rows are in flight."""

    raw: dict[str, int] = field(default_factory=dict)
    scheduled: dict[str, int] = field(default_factory=dict)
    under_way: list[list[_Issued]] = field(default_factory=list)


class PromptQueues:
    """The prompt queues of one scheduler.

    Args:
        order: How a window is sorted.
        window: Prompts that are sorted at a time.
        issue: Sends a row of a sequence with at most so many tokens; returns False if there are no pages for it.
    """

    def __init__(
        self,
        state: ClusterState,
        order: PromptOrder,
        window: int,
        issue: Callable[[ScheduledSequence, int, int], bool],
    ) -> None:
        self._state, self._order, self._window, self._issue = state, order, window, issue
        self._chunk = state.config.prefill_chunk
        self._queues: dict[tuple[str, ...], _PathQueue] = {}

    def add(self, sequence: ScheduledSequence) -> None:
        """Queue a sequence that is to compute its prompt; one that is queued keeps its place."""
        queue = self._queues.setdefault(tuple(hop.device for hop in sequence.path), _PathQueue())
        self._state.queued.add(sequence.seq)
        if queue.scheduled.get(sequence.seq) != sequence.epoch and queue.raw.get(sequence.seq) != sequence.epoch:
            queue.scheduled.pop(sequence.seq, None)
            queue.raw.pop(sequence.seq, None)
            queue.raw[sequence.seq] = sequence.epoch

    def run(self, now: int) -> None:
        """Send chunks on all paths that have room for another one."""
        for path, queue in tuple(self._queues.items()):
            self._remove_gone(queue.raw, path)
            self._remove_gone(queue.scheduled, path)
            self._run_path(path, queue, now)
            if not (queue.raw or queue.scheduled or queue.under_way):
                del self._queues[path]

    def waiting(self) -> dict[tuple[str, ...], tuple[int, int]]:
        """Return how many prompts are raw and how many scheduled, by the devices of their path."""
        return {path: (len(queue.raw), len(queue.scheduled)) for path, queue in self._queues.items()}

    # -- internals -----------------------------------------------------------------------------------------------------

    def _run_path(self, path: tuple[str, ...], queue: _PathQueue, now: int) -> None:
        queue.under_way = [chunk for chunk in queue.under_way if any(map(_in_flight, chunk))]
        while len(queue.under_way) < len(path):
            ready = self._ready(queue.scheduled)
            while queue.raw and sum(job.left for job in ready) < self._chunk:
                self._schedule(queue)
                ready = self._ready(queue.scheduled)
            issued = [row for part in assemble(ready, self._chunk) if (row := self._send(part.seq, part.tokens, now))]
            if not issued:
                return
            queue.under_way.append(issued)
            self._count(path, issued, now)

    def _schedule(self, queue: _PathQueue) -> None:
        for seq in next_window(self._jobs(queue.raw), self._window, self._order):
            queue.scheduled[seq] = queue.raw.pop(seq)

    def _send(self, seq: str, tokens: int, now: int) -> _Issued | None:
        """Send a row of a prompt; return None if there are no pages for it."""
        sequence, starved = self._state.running[seq], self._state.starved
        row = sequence, sequence.epoch, sequence.computed
        self._state.queued.discard(seq)
        if not self._issue(sequence, tokens, now):
            starved[seq] = sequence
            return None
        starved.pop(seq, None)
        return row

    def _count(self, path: tuple[str, ...], issued: Sequence[_Issued], now: int) -> None:
        counters, tokens = self._state.counters, sum(sequence.issued for sequence, _, _ in issued)
        counters.prompt_chunks += 1
        counters.prompt_chunk_tokens += tokens
        if self._state.tell.on:
            chunk = [[sequence.seq, sequence.issued] for sequence, _, _ in issued]
            self._state.tell.control(
                now, "prefill.chunk", "TI-08", path[0], chunk=chunk, padding=max(self._chunk - tokens, 0)
            )

    def _ready(self, names: Iterable[str]) -> list[PromptJob]:
        """Return the scheduled prompts that may have a row in the next chunk."""
        queued, running = self._state.queued, self._state.running
        return [job for job in self._jobs(names) if job.seq in queued and _is_free(running[job.seq])]

    def _jobs(self, names: Iterable[str]) -> list[PromptJob]:
        found = []
        for seq in names:
            sequence = self._state.running[seq]
            found.append(PromptJob(seq, sequence.tokens - sequence.computed, sequence.request.priority))
        return found

    def _remove_gone(self, names: dict[str, int], path: tuple[str, ...]) -> None:
        """Remove prompts that are computed, have ended, or are elsewhere."""
        running = self._state.running
        for seq, epoch in tuple(names.items()):
            sequence = running.get(seq)
            if sequence is None or sequence.epoch != epoch or not sequence.path or sequence.phase == "decode":
                del names[seq]


def _is_free(sequence: ScheduledSequence) -> bool:
    """Return whether rows of a sequence may be sent now."""
    waits = sequence.waits
    rests = waits.held or waits.doomed or waits.skipped or waits.mends
    return not (sequence.flying or rests or waits.paused is not None)


def _in_flight(row: _Issued) -> bool:
    """Return whether a row has not come back, and its sequence is where it was."""
    sequence, epoch, computed = row
    return sequence.flying and sequence.epoch == epoch and sequence.computed == computed
