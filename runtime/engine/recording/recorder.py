"""Ways to repeat a step's work without Python: a CUDA graph, or, where there are none, running the work again.

Recorded work reads and writes the same tensors every time; the caller copies new values into them before a replay. This
module is independent of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    next one runs. The work is run once on a side stream before it is recorded, for what is created at first use
    (library handles, joined adapters). While it is recorded, a wait for the device or a copy from the host
    (`kv.transfers.put`) raises RuntimeError. Other threads may use the device meanwhile: only calls of this thread
    count.
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
            steps.wait_stream(self._side)
            with torch.cuda.graph(graph, self._memory, self._side, capture_error_mode="thread_local"):
                made = work()
        except RuntimeError as why:
            steps.wait_stream(self._side)
            raise Unrecordable(str(why)) from why

        def replay() -> Mapping[str, Tensor]:
            graph.replay()
            return made

        return replay
