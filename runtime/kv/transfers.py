"""Copy data between the host and a device without either waiting for the other.

A plain copy from the host to a GPU waits for everything launched before it; a copy from pinned memory is queued behind
it. torch keeps the pinned memory until it has been read. On a CPU, nothing is copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_CODES = {torch.int64: "q", torch.float64: "d", torch.float32: "f"}


def put(values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return host numbers as a tensor [len(values)] on a device. `dtype`: int64, float64 or float32.

    Raises RuntimeError while a CUDA graph is recorded, because a replay would copy whatever the host memory holds then.
    """
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    return _moved(torch.frombuffer(array(_CODES[dtype], values), dtype=dtype), device)


def put_array(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return a host array as a tensor on a device, as `put`; on the CPU it is the array's memory."""
    return _moved(torch.from_numpy(values), device)


def _moved(host: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return host
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a copy from the host cannot be recorded")
    return host.pin_memory().to(device, non_blocking=True)


class Fetch:
    """Copy a tensor to the host asynchronously.

    On a GPU the copy starts at once, queued behind what was launched. On a CPU nothing is copied, so nothing may write
    to the tensor until it is read.
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
        """Wait for the copy and return the values as nested lists."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
