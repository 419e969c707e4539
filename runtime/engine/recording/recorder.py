"""Ways to repeat a step's work without Python: a CUDA graph, or, where there are none, running the work again.

Recorded work reads and writes the same tensors every time; the caller copies new values into them before a replay. This
module is independent of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

#: Runs a step's work; the results are overwritten by the next run.
Work = Callable[[], Mapping[str, Tensor]]


class Unrecordable(Exception):
    """The work cannot be recorded: it waits for the device, or uses something that a recording does not allow."""


class StepRecorder(Protocol):
    """Records work so that it can be repeated."""

    def record(self, work: Work) -> Work:
        """Return a function that repeats the work on the current contents of its tensors.

        The work itself is run at least once.

        Raises:
            Unrecordable: the work cannot be recorded.
        """
        ...


class Rerun:
    """`StepRecorder` without recording: the work is run again."""

    def record(self, work: Work) -> Work:
        work()
        return work


class CudaRecorder:
    """`StepRecorder` with CUDA graphs.

    All recordings of one recorder share their memory: only one runs at a time, and its results must be read before the
    next one runs. The work is run twice on a side stream before it is recorded: once for what is created at first use
    (library handles, joined adapters), and once to detect waits for the device, which cannot be recorded.
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
    """Make torch raise RuntimeError wherever it would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
