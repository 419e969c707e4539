"""Upload weights to a device through two pinned buffers: one is filled while the other is transferred.

    stored tensor --read, cast, a part at a time--> buffer 0 | buffer 1 --a separate stream--> the device's tensor

Computation on the device waits for the last part on the device, not on the host. CUDA calls are behind `UploadLink`;
`HostLink` does the same on a CPU with synchronous copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

#: Bytes of one of the two buffers.
BUFFER_BYTES = 32 << 20

#: Blocks the host until a part has arrived.
Arrival = Callable[[], object]


class UploadLink(Protocol):
    """The transfer to a device. Parts are sent between `begin` and `join`; `join` also follows an error."""

    def buffer(self, nbytes: int) -> Tensor:
        """Return host memory, uint8 [nbytes], that parts can be sent from."""
        ...

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory on the device."""
        ...

    def begin(self) -> None: ...

    def send(self, part: Tensor, into: Tensor) -> Arrival:
        """Start copying a part; its buffer must not be changed until it has arrived."""
        ...

    def join(self) -> None:
        """Make later computation on the device wait for everything that was sent."""
        ...


class HostLink:
    """`UploadLink` to a CPU."""

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def begin(self) -> None:
        return

    def send(self, part: Tensor, into: Tensor) -> Arrival:
        into.copy_(part)
        return _arrived

    def join(self) -> None:
        return


class CudaLink:
    """`UploadLink` to a GPU, on a stream separate from the computing one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=self._device)
        self.begin()  # the allocator may reuse memory that the computing stream still uses
        return made

    def begin(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def send(self, part: Tensor, into: Tensor) -> Arrival:
        with torch.cuda.stream(self._side):
            into.copy_(part, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._side)
        return event.synchronize

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)


class Uploads:
    """Transfers tensors through two buffers, which are allocated on first use and kept.

    Args:
        nbytes: Size of one buffer, a multiple of 8. Two buffers are all the host memory used beyond the tensors
            themselves.
    """

    def __init__(self, link: UploadLink, nbytes: int = BUFFER_BYTES) -> None:
        self._link = link
        self._nbytes = nbytes
        self._buffers: tuple[Tensor, ...] = ()
        self._arrivals: list[Arrival] = [_arrived, _arrived]
        self._turn = 0

    def place(self, tensors: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        """Return copies of the tensors on the device, in order; floating-point ones in `dtype`, unless that is None.

        Raises the errors of reading or allocating; no transfer is in flight then.
        """
        if not self._buffers:
            self._buffers = (self._link.buffer(self._nbytes), self._link.buffer(self._nbytes))
        self._link.begin()
        try:
            return [
                self._sent(tensor, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
                for tensor in tensors
            ]
        finally:
            self._link.join()

    def _sent(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        made = self._link.empty(tensor.shape, dtype)
        source, into = tensor.reshape(-1), made.view(-1)
        for lo, hi in _parts(source.numel(), self._nbytes // dtype.itemsize):
            turn, self._turn = self._turn, 1 - self._turn
            self._arrivals[turn]()
            part = self._buffers[turn].view(dtype)[: hi - lo]
            part.copy_(source[lo:hi])
            self._arrivals[turn] = self._link.send(part, into[lo:hi])
        return made


def uploads_to(device: torch.device) -> Uploads | None:
    """Return the upload for a device; None if tensors are mapped instead."""
    return Uploads(CudaLink(device)) if device.type == "cuda" else None


def _parts(count: int, most: int) -> Iterator[tuple[int, int]]:
    return ((lo, min(lo + most, count)) for lo in range(0, count, most))


def _arrived() -> None:
    return
