"""Run batches of prompts on a thread of their own, beside the windows of the decoding rows (BA-08).

    step n      window of the decoding rows   |  thread: a batch of prompts starts, its rows are deferred
    step n+1    window                        |  thread: still running, deferred again
    step n+2    window, and the prompts' tokens: their batch has ended

One batch runs at a time, over units that both threads share. What a step modifies exists twice, as for a second lane
(`engine.executors.second_lane`): rotary modules, programs, joined adapters, a CUDA stream.

Contract: all methods are called by the engine's thread. While a batch runs, its sequences are neither released nor
copied, and nothing is loaded or unloaded: the caller waits first (`finish`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from runtime.engine.dense.batch import DenseBatch
from runtime.engine.dense.context import DenseContexts, PaddedBatch
from runtime.engine.dense.padding_stats import IdleCounts
from runtime.engine.kernels.program_cache import Programs
from runtime.engine.models.components import ComponentPool
from runtime.engine.models.openmp import use_one_thread
from runtime.engine.sampling.output import Outcome
from runtime.engine.step.runner import StepRun
from runtime.types import PromptLogprobs, Row, Sampled, SegmentRun


@dataclass(frozen=True, slots=True)
class RanPrompt:
    """A row of an ended batch: what it sampled, if it samples, and the scores of its tokens."""

    row: Row
    sampled: tuple[Sampled, ...]
    scores: tuple[PromptLogprobs, ...]


@dataclass(frozen=True, slots=True)
class _RunningPrompts:
    lane: DenseBatch
    rows: Mapping[str, Row]
    batch: PaddedBatch
    future: Future[tuple[Outcome, list[SegmentRun]]]


class PromptThread:
    """The thread and its batch.

    Args:
        units: the components of the engine.
        trace: record the segments that run.
    """

    def __init__(self, units: ComponentPool, trace: bool) -> None:
        self._units = units
        self._own = copy.copy(units)
        self._own.rotaries = {}
        self._trace = trace
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prompts", initializer=use_one_thread)
        self._running: _RunningPrompts | None = None
        self._ran: dict[str, RanPrompt] = {}
        self._failed: dict[str, Exception] = {}
        #: Places and segments of batches that have ended since they were last taken.
        self._idle, self._segments = IdleCounts(), list[SegmentRun]()

    @property
    def busy(self) -> bool:
        return self._running is not None

    def runs(self, seqs: Iterable[str]) -> bool:
        """Return whether a row of any of these sequences is running."""
        return self._running is not None and not self._running.rows.keys().isdisjoint(seqs)

    def start(self, lane: DenseBatch, rows: Sequence[Row]) -> None:
        """Start a batch of prompts of one model; none may be running."""
        for key, made in self._units.rotaries.items():
            if key not in self._own.rotaries:  # some kinds of scaling modify their module
                self._own.rotaries[key] = copy.deepcopy(made)
        self._own.programs = Programs(self._units.kernels is not None)
        batch = lane.apart(rows)
        ready = torch.cuda.current_stream() if self._units.device.type == "cuda" else None
        future = self._pool.submit(self._run, lane.model.spec.name, batch, ready)
        self._running = _RunningPrompts(lane, {row.seq: row for row in rows}, batch, future)

    @torch.inference_mode()
    def finish(self, wait: bool) -> None:
        """Keep the results and the K and V of the batch if it has ended, or after waiting for it."""
        running = self._running
        if running is None or not (wait or running.future.done()):
            return
        try:
            outcome, segments = running.future.result()
            self._idle = self._idle.plus(running.lane.counts(running.batch))
            self._segments.extend(segments)
            running.lane.save_kv(running.batch)
        except Exception as error:
            self._failed |= dict.fromkeys(running.rows, error)
            return
        finally:
            running.lane.close_prompts()
            self._running = None
        for seq, row in running.rows.items():
            self._ran[seq] = RanPrompt(
                row,
                tuple(one for one in outcome.sampled if one.seq == seq),
                tuple(one for one in outcome.prompts if one.seq == seq),
            )

    def take_result(self, seq: str) -> RanPrompt | None:
        """Remove and return what a sequence's row has resulted in, if its batch has ended.

        Raises the error of its batch if that has failed; the sequence has lost its K and V then.
        """
        if seq in self._failed:
            raise self._failed[seq]
        return self._ran.pop(seq, None)

    def take_counts(self) -> tuple[IdleCounts, list[SegmentRun]]:
        """Return and reset the places and segments of ended batches."""
        found = self._idle, self._segments
        self._idle, self._segments = IdleCounts(), []
        return found

    def remove_sequences(self, seqs: Collection[str]) -> None:
        """Drop results of released sequences, none of which is running."""
        for seq in seqs:
            self._ran.pop(seq, None)
            self._failed.pop(seq, None)

    def _run(self, name: str, batch: PaddedBatch, ready: torch.cuda.Stream | None) -> tuple[Outcome, list[SegmentRun]]:
        """Run a batch. `ready`: the CUDA stream that has written what it reads."""
        own = None if ready is None else torch.cuda.Stream(self._units.device)  # type: ignore[no-untyped-call]
        with torch.inference_mode(), nullcontext() if own is None else torch.cuda.stream(own):
            if own is not None and ready is not None:
                own.wait_stream(ready)
            run = StepRun({name: batch.rows}, DenseContexts({name: batch}, self._own), self._units.device, self._trace)
            outcome = run.execute(self._units.operations)
            if own is not None:
                own.synchronize()  # the next step reads the K and V
        return outcome, run.segments
