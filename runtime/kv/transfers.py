"""Between the host and a device without either waiting for the other: what goes there, and what comes from there.

A plain copy from the host to a GPU waits for all that was launched before it; one from pinned memory is done in its
turn. torch keeps such memory until it has been read. On a CPU host and device are one, and nothing is copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_CODES = {torch.int64: "q", torch.float64: "d", torch.float32: "f"}


def put(values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor [len(values)] of numbers that the host has. `dtype`: int64, float64 or float32."""
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    host = torch.frombuffer(array(_CODES[dtype], values), dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class Fetch:
    """A tensor on its way to the host. On a GPU that begins at once, behind what was launched; nothing may write to it
    on a CPU.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def values(self) -> Any:
        """As nested lists; waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
