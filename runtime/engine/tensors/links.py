"""Tensors between agents' devices without a copy in host memory (BL-33).

`DirectLinks` implements `runtime.transport.interfaces.TensorTransport` over a process group, with one endpoint per peer
and direction:

    send       arrays -> one flat uint8 tensor on the device (a view, for a single array) -> OutgoingTensors
    arrival    IncomingTensors -> one flat tensor -> arrays, views of it

Contract: that of the protocol. One thread calls it, and only methods that document it wait. Outgoing arrays are what
the engine makes: host bytes or flat uint8 tensors (`engine.tensors.convert`). Incoming ones are tensors, or bytes for
an engine that does not use torch.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from runtime.chains import Array
from runtime.config import DirectConfig
from runtime.engine.tensors.checksum import checksum
from runtime.engine.tensors.convert import bytes_of, flat_of, is_tensor
from runtime.engine.tensors.endpoints import IncomingTensors, OutgoingTensors
from runtime.engine.tensors.process_groups import ProcessGroup
from runtime.transport.interfaces import CHECKSUM, ArrivedTensor, PeerNotice

_log = logging.getLogger(__name__)

#: Seconds to wait for the links' threads when closing.
_PATIENCE = 2.0

warnings.filterwarnings("ignore", message="The given buffer is not writable")  # outgoing buffers are only read


class DirectLinks:
    """`TensorTransport` over direct links.

    `as_bytes`: incoming arrays have host bytes as data; on a CPU this needs no copy.
    """

    def __init__(self, process_group: ProcessGroup, config: DirectConfig, as_bytes: bool = False) -> None:
        self._process_group, self._config = process_group, config
        self._shape: Callable[[Tensor], Any] = bytes_of if as_bytes else lambda data: data
        self._wake: Callable[[], None] = lambda: None
        self._outgoing: dict[str, OutgoingTensors] = {}
        self._incoming: dict[str, IncomingTensors] = {}
        self._announced: dict[tuple[str, int], tuple[Array, ...]] = {}
        self._said: SimpleQueue[tuple[object, PeerNotice]] = SimpleQueue()
        self._came: SimpleQueue[tuple[IncomingTensors, str, int, Tensor | None, str]] = SimpleQueue()

    @property
    def process_group(self) -> str:
        return self._process_group.name

    def begin(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    # -- links -------------------------------------------------------------------------------------------------------

    def offer(self, peer: str) -> None:
        if peer in self._outgoing:
            return
        end: OutgoingTensors
        end = OutgoingTensors(
            self._process_group,
            self._config,
            lambda *told: self._queue_notice(end, peer, True, *told),
            lambda why: self._report_closed(end, peer, why),
            peer,
        )
        self._outgoing[peer] = end
        end.begin()

    def handle_rendezvous(self, peer: str, outgoing: bool, key: str, value: bytes) -> None:
        if not outgoing and peer not in self._incoming:
            self._accept(peer)
        end = (self._outgoing if outgoing else self._incoming).get(peer)
        if end is not None:
            end.handle_rendezvous(key, value)

    def handle_close(self, peer: str, outgoing: bool, reason: str) -> None:
        end = (self._outgoing if outgoing else self._incoming).get(peer)
        if end is not None:
            end.end(f"the other end: {reason}")

    def drain_notices(self) -> list[PeerNotice]:
        out: list[PeerNotice] = []
        while not self._said.empty():
            end, said = self._said.get()
            if self._is_now(end, said.peer, said.outgoing):
                out.append(said)
        return out

    def state(self) -> Mapping[str, str]:
        return {peer: end.state for peer, end in self._outgoing.items()}

    def remove_peer(self, peer: str) -> None:
        for end in (self._outgoing.pop(peer, None), self._incoming.pop(peer, None)):
            if end is not None:
                end.end("that life of it is over")
        for each in [each for each in self._announced if each[0] == peer]:
            del self._announced[each]

    def close(self) -> None:
        """End all links and wait up to `_PATIENCE` seconds for their threads."""
        ends = [*self._outgoing.values(), *self._incoming.values()]
        self._outgoing, self._incoming = {}, {}
        for end in ends:
            end.end("this agent ends")
        for end in ends:
            end.join(_PATIENCE / len(ends))

    # -- transfers ---------------------------------------------------------------------------------------------------

    def carries(self, peer: str, nbytes: int) -> bool:
        end = self._outgoing.get(peer)
        return end is not None and end.carries(nbytes)

    def send(self, peer: str, ticket: int, arrays: Sequence[Array]) -> None:
        end = self._outgoing.get(peer)
        if end is None:
            return
        try:
            parts = [self._on_device(array) for array in arrays]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        except Exception as error:  # for example out of device memory
            end.end(f"it could not be sent: {type(error).__name__}")
            return
        end.send(whole, ticket)

    def expects(self, peer: str) -> bool:
        return peer in self._incoming

    def expect(self, peer: str, ticket: int, arrays: Sequence[Array]) -> None:
        self._announced[peer, ticket] = tuple(arrays)
        self._incoming[peer].expect(ticket, sum(map(_nbytes, arrays)))

    def drain_arrivals(self) -> list[ArrivedTensor]:
        out: list[ArrivedTensor] = []
        while not self._came.empty():
            end, peer, ticket, whole, error = self._came.get()
            if self._incoming.get(peer) is not end:
                continue
            kinds = self._announced.pop((peer, ticket))
            out.append(ArrivedTensor(peer, ticket, () if whole is None else self._cut(whole, kinds), error))
        return out

    # -- arrays on any device ----------------------------------------------------------------------------------------

    def hosted(self, array: Array) -> Array:
        return Array(array.dtype, array.shape, bytes_of(array.data.cpu())) if is_tensor(array) else array

    def joined(self, pieces: Sequence[tuple[Array, int, int]]) -> Array:
        like = pieces[0][0]
        parts = []
        for array, first, last in pieces:
            data, row = self._on_device(array), _nbytes(array) // array.shape[0]
            parts.append(data[first * row : last * row])
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Array(like.dtype, (sum(last - first for _, first, last in pieces), *like.shape[1:]), self._shape(whole))

    def digest(self, array: Array) -> str:
        return CHECKSUM + checksum(flat_of(array))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _accept(self, peer: str) -> None:
        end: IncomingTensors
        end = IncomingTensors(
            self._process_group,
            self._config,
            lambda *told: self._queue_notice(end, peer, False, *told),
            lambda why: self._report_closed(end, peer, why, False),
            lambda *what: self._arrived(end, peer, *what),
            peer,
        )
        self._incoming[peer] = end
        end.begin()

    def _queue_notice(self, end: object, peer: str, outgoing: bool, key: str, value: bytes) -> None:
        self._said.put((end, PeerNotice(peer, outgoing, key, value)))
        self._wake()

    def _report_closed(self, end: object, peer: str, reason: str, outgoing: bool = True) -> None:
        if self._is_now(end, peer, outgoing):
            way = "to" if outgoing else "from"
            _log.warning("the direct link %s %s is over, tensors go by the host's memory: %s", way, peer, reason)
        self._said.put((end, PeerNotice(peer, outgoing, "", b"", reason)))
        self._wake()

    def _arrived(self, end: IncomingTensors, peer: str, ticket: int, whole: Tensor | None, error: str) -> None:
        self._came.put((end, peer, ticket, whole, error))
        self._wake()

    def _is_now(self, end: object, peer: str, outgoing: bool) -> bool:
        """Return whether an endpoint is the current one of a peer, and not of an earlier incarnation."""
        return (self._outgoing if outgoing else self._incoming).get(peer) is end

    def _on_device(self, array: Array) -> Tensor:
        return flat_of(array).to(self._process_group.device)

    def _cut(self, whole: Tensor, kinds: Sequence[Array]) -> tuple[Array, ...]:
        out: list[Array] = []
        at = 0
        for kind in kinds:
            end = at + _nbytes(kind)
            out.append(Array(kind.dtype, kind.shape, self._shape(whole[at:end])))
            at = end
        return tuple(out)


def _nbytes(array: Array) -> int:
    return prod(array.shape) * getattr(torch, array.dtype).itemsize  # type: ignore[no-any-return]
