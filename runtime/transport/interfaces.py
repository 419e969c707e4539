"""Define the interface of transports that send tensors from device to device, past host memory: NCCL, gloo.

Implemented in `engine.tensors`.

    A.offer(B)                  start a link to B: a group of two for each ordered pair; one end only sends, the other
                                only receives
    drain_notices /             rendezvous messages that both ends exchange until the link stands; the owner of the
    handle_rendezvous           transport carries them as typed messages
    A.send(B, n)                a message's arrays under ticket n; the message itself goes over the messenger
    B.expect(A, n), B.drain_arrivals()

One thread calls a TensorTransport, and no call waits. Slow work runs on threads of its own, which call `wake` when
there is a result; each of their waits has a limit. An expected tensor either arrives or is reported as failed.

A link that failed once stays closed for both ends until one of them is a new incarnation; the owner uses other means.
Arrays that are sent must not change any more. Data is neither encrypted nor authenticated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from runtime.chains import Array
from runtime.config import DirectConfig

#: Prefix of checksums that are computed on the array's device; no other digest has it.
CHECKSUM = "sum:"


@dataclass(frozen=True, slots=True)
class PeerNotice:
    """Hold a notice to send to a peer: a key of the rendezvous, or (with an empty `key`) that the link is closed.

    Fields:
        outgoing: True for the link on which this end sends, false for the opposite one.
        reason: Why the link is closed.
    """

    peer: str
    outgoing: bool
    key: str
    value: bytes
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ArrivedTensor:
    """Hold the arrays of an expected ticket, or the error why they do not arrive."""

    peer: str
    ticket: int
    arrays: tuple[Array, ...]
    error: str = ""


class TensorTransport(Protocol):
    """Transfer tensors over direct links; see the module docstring."""

    @property
    def process_group(self) -> str:
        """Return the name of the transport and its reach. Two ends can be linked if theirs are equal."""
        ...

    def begin(self, wake: Callable[[], None]) -> None:
        """Start the transport, before any other call. `wake` may be called from any thread."""
        ...

    def offer(self, peer: str) -> None:
        """Start a link to a peer. Does nothing if one was started before, whatever its state."""
        ...

    def handle_rendezvous(self, peer: str, outgoing: bool, key: str, value: bytes) -> None:
        """Process a key from a peer.

        `outgoing`: it is for the link on which this end sends; False: for the opposite link, which starts with the
        first key.
        """
        ...

    def handle_close(self, peer: str, outgoing: bool, reason: str) -> None:
        """Process a peer's notice that a link is closed."""
        ...

    def drain_notices(self) -> list[PeerNotice]:
        """Return and remove the notices to send to peers, in order."""
        ...

    def carries(self, peer: str, nbytes: int) -> bool:
        """Return whether `nbytes` bytes can be sent to a peer now."""
        ...

    def send(self, peer: str, ticket: int, arrays: Sequence[Array]) -> None:
        """Send arrays under a ticket; tickets grow. On failure the link is closed and the other end is notified."""
        ...

    def expects(self, peer: str) -> bool:
        """Return whether a link from that peer was ever started."""
        ...

    def expect(self, peer: str, ticket: int, arrays: Sequence[Array]) -> None:
        """Register arrays that a peer announced, given without `data`; `drain_arrivals` returns them or an error.

        Tickets grow.
        """
        ...

    def drain_arrivals(self) -> list[ArrivedTensor]:
        """Return the tickets that arrived or failed since the last call, each once."""
        ...

    def remove_peer(self, peer: str) -> None:
        """Close the links with an incarnation of a peer; nothing of it arrives any more."""
        ...

    def state(self) -> Mapping[str, str]:
        """Return the state of the link to each peer: `direct`, `making`, or why it is closed."""
        ...

    def close(self) -> None: ...

    # -- arrays on any device ------------------------------------------------------------------------------------------

    def hosted(self, array: Array) -> Array:
        """Return the array in host memory. May wait for the device."""
        ...

    def joined(self, pieces: Sequence[tuple[Array, int, int]]) -> Array:
        """Concatenate rows [first, last) of arrays [tokens, width]; at least one, all of one dtype and width."""
        ...

    def digest(self, array: Array) -> str:
        """Return a checksum computed on the array's device, equal on all devices: CHECKSUM and hexadecimal digits."""
        ...


@runtime_checkable
class Connectable(Protocol):
    """Define an engine that can send and receive its arrays directly."""

    def direct(self, config: DirectConfig, host: str) -> TensorTransport:
        """Return its transport and keep its arrays on the device from now on. Call it once, before any step.

        `host`: the address at which other machines reach it; empty for this machine only. Raises
        zoo.errors.NotServable.
        """
        ...
