"""What an agent needs of a transport that takes tensors from device to device, past the host's memory: NCCL, gloo
(`engine.tensors.links`).

    A.offer(B)      A begins a link to B: groups of two for each ordered pair, one only ever sends, the other only ever
                    receives
    said / met      what both ends must tell each other until it stands: carried by whoever holds this, as typed
                    messages
    A.send(B, n)    B.expect(A, n) … B.came()      a message's arrays under a ticket; the message itself travels as ever
                                                   (`directed`)

Contract of a TensorTransport: one thread calls it, and nothing here waits: work that takes time is done on threads
of its own, which call `wake` when there is something to be looked at. Every wait of theirs has a limit. What is
expected comes, or is told not to come; a link that failed once is over for both ends, until either is another life,
and whoever holds this goes on by other means. Arrays that go out must not change any more. What is carried is
neither encrypted nor authenticated. Knows no messages, and not who may speak with whom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from runtime.chains import Array
from runtime.config import DirectConfig

#: What checksums of arrays wherever they lie begin with, and no other digest does.
CHECKSUM = "sum:"


@dataclass(frozen=True, slots=True)
class PeerNotice:
    """To be told to a peer, of the link on which this end sends (`outgoing`), or of the other one: a key of the
    rendezvous, or that the link is over (`key` is empty), and why."""

    peer: str
    outgoing: bool
    key: str
    value: bytes
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ArrivedTensor:
    """What was expected of a peer: its arrays, or why they do not come."""

    peer: str
    ticket: int
    arrays: tuple[Array, ...]
    error: str = ""


class TensorTransport(Protocol):
    """See the top of the file."""

    @property
    def process_group(self) -> str:
        """Which transport it is, and how far it reaches: two ends can be linked if theirs are the same."""
        ...

    def begin(self, wake: Callable[[], None]) -> None:
        """Before anything else. `wake`: may be called from any thread."""
        ...

    def offer(self, peer: str) -> None:
        """Begin a link to a peer; one that was begun, whatever became of it, is nothing to do."""
        ...

    def handle_rendezvous(self, peer: str, outgoing: bool, key: str, value: bytes) -> None:
        """What a peer says of the link on which this end sends, or (`outgoing` is false) of the other one, which begins
        by that.
        """
        ...

    def handle_close(self, peer: str, outgoing: bool, reason: str) -> None:
        """A peer says that a link is over."""
        ...

    def drain_notices(self) -> list[PeerNotice]:
        """What peers are to be told, in order; handed over."""
        ...

    def carries(self, peer: str, nbytes: int) -> bool:
        """Whether so many bytes may go to a peer now."""
        ...

    def send(self, peer: str, ticket: int, arrays: Sequence[Array]) -> None:
        """If that fails the link is over, and the other end is told. Tickets grow."""
        ...

    def expects(self, peer: str) -> bool:
        """Whether a link from that peer was ever begun."""
        ...

    def expect(self, peer: str, ticket: int, arrays: Sequence[Array]) -> None:
        """A peer has announced arrays of these kinds, whose `data` is nothing: they will be in `came`, or why not.
        Tickets grow.
        """
        ...

    def drain_arrivals(self) -> list[ArrivedTensor]:
        """What has come, or will not, since the last look: each ticket once."""
        ...

    def remove_peer(self, peer: str) -> None:
        """That life of a peer is over: nothing of it comes any more."""
        ...

    def state(self) -> Mapping[str, str]:
        """Peers with a link to them: `direct`, `making`, or why it is over."""
        ...

    def close(self) -> None: ...

    # -- arrays wherever they lie ------------------------------------------------------------------------------------

    def hosted(self, array: Array) -> Array:
        """The same in the host's memory. May wait for the device."""
        ...

    def joined(self, pieces: Sequence[tuple[Array, int, int]]) -> Array:
        """Rows [first, last) of arrays [tokens, width] below each other; at least one. All are of one dtype and
        width.
        """
        ...

    def digest(self, array: Array) -> str:
        """A checksum, taken where it lies, the same on any device: CHECKSUM and hexadecimal digits."""
        ...


@runtime_checkable
class Connectable(Protocol):
    """An engine whose arrays can go directly."""

    def direct(self, config: DirectConfig, host: str) -> TensorTransport:
        """Its transport; from now on its arrays stay on its device. To be called once, before any step.

        `host`: the address at which other machines reach it; empty: nobody else does. Raises zoo.errors.NotServable.
        """
        ...
