"""The transports under direct links, each a group of two of torch.distributed: gloo between CPUs, NCCL between
GPUs.

    group      by a rendezvous; rank 0 sends, rank 1 receives        send, receive      begun, not waited for
                                                                     arrived      waited for

Contract: `group` and `arrived` wait, within a limit, and are called on threads of a link's own; `send` and
`receive` do not, once the group has been used. A tensor belongs to the transport from `send` or `receive` until it
has `arrived`. On CUDA both are ordered behind what was launched on the caller's current stream, and run on a stream
of the group's own. Raises RuntimeError (torch's own errors) and TimeoutError.

Neither encrypts, nor knows who is at the other end; gloo ends the process on a tensor that is larger than was said,
and does not tell of a peer's end in the middle of what goes there (of what comes from there it does): that ends at
its limit. NCCL is written after torch's own use of it, and has run on no GPU yet.
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

#: What of a link's limit is looked at a time, where there is nothing to wait for but by looking.
_LOOK = 50e-6
#: Tags are 32 bits wide, signed.
_TAGS = 1 << 31


class ProcessGroup(Protocol):
    """`device`: where tensors lie. `name`: as `runtime.transport.interfaces.TensorTransport.rail`."""

    device: torch.device

    @property
    def name(self) -> str: ...

    def group(self, store: Rendezvous, rank: int, seconds: float) -> Any: ...

    def empty(self, nbytes: int) -> Tensor:
        """Room for so many bytes on the device: flat, uint8."""
        ...

    def send(self, group: Any, tensor: Tensor, tag: int, to: int = 1) -> Any: ...

    def receive(self, group: Any, tensor: Tensor, tag: int, of: int = 0) -> Any: ...

    def arrived(self, work: Any, seconds: float) -> None: ...

    def abort(self, group: Any) -> None:
        """Nothing goes over it any more; whoever waits for it need not much longer."""
        ...


class Gloo:
    """See the top of the file. `host`: the address that it listens on; empty: only on this machine."""

    def __init__(self, host: str = "") -> None:
        """Raises NotServable where torch has none."""
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
        """What waits ends when the other end closes, or at its limit; the connection closes when nobody has the group
        any more.
        """


class Nccl:
    """See the top of the file. `device`: whose GPU; `host`: as of Gloo, for how it is named."""

    def __init__(self, device: torch.device, host: str = "") -> None:
        """Raises NotServable where torch has none."""
        if not (dist.is_available() and dist.is_nccl_available()):
            raise NotServable("this torch has no NCCL: tensors go by the host's memory only")
        self.device, self._host = torch.device(device), host
        # A link that fails is our affair; by default it would end the process, from a thread of torch's.
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
        """By looking: its own `wait` has a stream wait, not the caller."""
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
    """Raises NotServable where torch has none for such devices."""
    if device.type == "cpu":
        return Gloo(host)
    if device.type == "cuda":
        return Nccl(device, host)
    raise NotServable(f"tensors on {device} go by the host's memory only")


def reach(host: str) -> str:
    """Who can be linked with an end on this machine: those that give the same. Of one that listens on the network: all
    of its kind.
    """
    return "network" if host else _machine()


def _machine() -> str:
    """This machine since it was started, and the network that a process sees of it."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return os.uname().nodename
