"""Ways to have a step's work done again without the step: a CUDA graph, or, where there are none, by running it again.

What is recorded reads and writes the same tensors every time; new values are copied into them before. Knows nothing of
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

#: What a step computes, in tensors that are overwritten by the next time.
Work = Callable[[], Mapping[str, Tensor]]


class Unrecordable(Exception):
    """The work cannot be recorded: it waits for the device, or needs what a recording must not."""


class StepRecorder(Protocol):
    def record(self, work: Work) -> Work:
        """What does the work again, on what its tensors hold by then. The work itself has been run, more than once
        perhaps.

        Raises:
            Unrecordable: it must be run as it is.
        """
        ...


class Rerun:
    """`StepRecorder` without any: the work is run again."""

    def record(self, work: Work) -> Work:
        work()
        return work


class CudaRecorder:
    """`StepRecorder` by CUDA graphs. All of one recorder share their memory: one runs at a time, and its results are
    read before the next.

    The work is run twice beside the stream of steps before it is recorded: once for what is made on first use
    (libraries' handles, joined adapters), and once on watch, since what waits for the device cannot be recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Work) -> Work:
        steps = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            self._side.wait_stream(steps)
            with torch.cuda.stream(self._side):
                work()
                with _no_waiting():
                    work()
            steps.wait_stream(self._side)
            with torch.cuda.graph(graph, pool=self._memory, stream=self._side):
                made = work()
        except RuntimeError as why:
            steps.wait_stream(self._side)
            raise Unrecordable(str(why)) from why

        def replay() -> Mapping[str, Tensor]:
            graph.replay()
            return made

        return replay


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Have torch raise RuntimeError wherever it would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
