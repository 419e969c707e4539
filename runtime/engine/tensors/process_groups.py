"""The transports of direct links, each a torch.distributed group of two: gloo between CPUs, NCCL between GPUs.

    group              makes a group by a rendezvous; rank 0 sends, rank 1 receives
    send, receive      begin a transfer, without waiting
    arrived            waits for a transfer

Contract: `group` and `arrived` wait, within a limit, and are called on a link's own threads; `send` and `receive` do
not wait once the group has been used. A tensor belongs to the transport from `send` or `receive` until `arrived`
returns. On CUDA both are ordered behind the work on the caller's current stream and run on a stream of the group's own.
Raises RuntimeError (torch's own errors) and TimeoutError.

Neither transport encrypts or authenticates. Gloo ends the process on a tensor larger than announced. It reports a
peer's end while receiving, but a send to an ended peer fails only at its time limit. NCCL follows torch's own use of it
and has not been run on a GPU yet.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.engine.tensors.rendezvous import Rendezvous
from zoo.errors import NotServable

#: Polling interval, in seconds, where completion can only be polled.
_LOOK = 50e-6
#: Tags are 32 bits wide, signed.
_TAGS = 1 << 31


class ProcessGroup(Protocol):
    """A transport for direct links.

    `device` holds the tensors. `name` is what `runtime.transport.interfaces.TensorTransport.process_group` returns.
    """

    device: torch.device

    @property
    def name(self) -> str: ...

    def group(self, store: Rendezvous, rank: int, seconds: float) -> Any: ...

    def empty(self, nbytes: int) -> Tensor:
        """Return an uninitialized flat uint8 tensor on the device."""
        ...

    def send(self, group: Any, tensor: Tensor, tag: int, to: int = 1) -> Any: ...

    def receive(self, group: Any, tensor: Tensor, tag: int, of: int = 0) -> Any: ...

    def arrived(self, work: Any, seconds: float) -> None: ...

    def abort(self, group: Any) -> None:
        """Stop all traffic of a group; calls that wait for it return soon."""
        ...


class Gloo:
    """Gloo between CPUs. `host`: the address that it listens on; empty means this machine only."""

    def __init__(self, host: str = "") -> None:
        """Raise NotServable if this build of torch has no gloo."""
        if not (dist.is_available() and dist.is_gloo_available()):
            raise NotServable("this torch has no gloo: tensors go by the host's memory only")
        self.device, self._host = torch.device("cpu"), host

    @property
    def name(self) -> str:
        return f"gloo/{reach(self._host)}"

    @cached_property
    def _listener(self) -> Any:
        return dist.ProcessGroupGloo.create_device(hostname=self._host or "127.0.0.1")

    def group(self, store: Rendezvous, rank: int, seconds: float) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads, options._timeout = [self._listener], 1, timedelta(seconds=seconds)
        return dist.ProcessGroupGloo(store, rank, 2, options)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def send(self, group: Any, tensor: Tensor, tag: int, to: int = 1) -> Any:
        return group.send([tensor], to, tag % _TAGS)

    def receive(self, group: Any, tensor: Tensor, tag: int, of: int = 0) -> Any:
        return group.recv([tensor], of, tag % _TAGS)

    def arrived(self, work: Any, seconds: float) -> None:
        work.wait(timedelta(seconds=seconds))

    def abort(self, group: Any) -> None:
        """Do nothing: waiting calls end when the other end closes, or at their limit.

        The connection closes when the last reference to the group is dropped.
        """


class Nccl:
    """NCCL between GPUs. `device`: the GPU; `host`: as for `Gloo`, used in the name."""

    def __init__(self, device: torch.device, host: str = "") -> None:
        """Raise NotServable if this build of torch has no NCCL."""
        if not (dist.is_available() and dist.is_nccl_available()):
            raise NotServable("this torch has no NCCL: tensors go by the host's memory only")
        self.device, self._host = torch.device(device), host
        # The link handles failures itself; by default torch would end the process from a thread of its own.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        if not host:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

    @property
    def name(self) -> str:
        return f"nccl/{reach(self._host)}"

    def group(self, store: Rendezvous, rank: int, seconds: float) -> Any:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        with torch.cuda.device(self.device):
            return dist.ProcessGroupNCCL(store, rank, 2, options)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def send(self, group: Any, tensor: Tensor, tag: int, to: int = 1) -> Any:
        with torch.cuda.device(self.device):
            return group.send([tensor], to, tag % _TAGS)

    def receive(self, group: Any, tensor: Tensor, tag: int, of: int = 0) -> Any:
        with torch.cuda.device(self.device):
            return group.recv([tensor], of, tag % _TAGS)

    def arrived(self, work: Any, seconds: float) -> None:
        """Wait by polling: NCCL's own `wait` makes a stream wait, not the caller."""
        end = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > end:
                raise TimeoutError(f"it has not come within {seconds:g} s")
            time.sleep(_LOOK)
        error = work.exception()
        if error is not None:
            raise RuntimeError(str(error))

    def abort(self, group: Any) -> None:
        group.abort()


def rail_for(device: torch.device, host: str) -> ProcessGroup:
    """Return the transport for a device. Raises NotServable if torch has none for it."""
    if device.type == "cpu":
        return Gloo(host)
    if device.type == "cuda":
        return Nccl(device, host)
    raise NotServable(f"tensors on {device} go by the host's memory only")


def reach(host: str) -> str:
    """Return a string that is the same for all ends that can be linked with one on this machine.

    For an end that listens on the network it is the same everywhere.
    """
    return "network" if host else _machine()


def _machine() -> str:
    """Return an identifier of this boot of the machine and of the process's network namespace."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return os.uname().nodename
