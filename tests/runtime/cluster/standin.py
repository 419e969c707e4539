"""A tensor transport without tensors: the test decides what arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from runtime.chains import Array
from runtime.transport.checksums import joined_rows
from runtime.transport.interfaces import CHECKSUM, ArrivedTensor, PeerNotice


class StandIn:
    """A fake of `runtime.transport.interfaces.TensorTransport` for one agent.

    Fields:
        links: Peers that it has a link to.
        accepts: Peers that have a link to it.
        offered, heard, ended, forgotten, sent, expected: Calls that it received, with their arguments.
        to_say: Notices that `drain_notices` will return.
        arrived: Tensors that `drain_arrivals` will return.
    """

    def __init__(self, process_group: str = "rail") -> None:
        self.process_group = process_group
        self.links: set[str] = set()
        self.accepts: set[str] = set()
        self.offered: list[str] = []
        self.heard: list[tuple[str, bool, str, bytes]] = []
        self.ended: list[tuple[str, bool, str]] = []
        self.forgotten: list[str] = []
        self.sent: dict[tuple[str, int], Sequence[Array]] = {}
        self.expected: list[tuple[str, int]] = []
        self.to_say: list[PeerNotice] = []
        self.arrived: list[ArrivedTensor] = []
        self.wake: Callable[[], None] = lambda: None

    def begin(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def offer(self, peer: str) -> None:
        self.offered.append(peer)

    def handle_rendezvous(self, peer: str, outgoing: bool, key: str, value: bytes) -> None:
        self.heard.append((peer, outgoing, key, value))

    def handle_close(self, peer: str, outgoing: bool, reason: str) -> None:
        self.ended.append((peer, outgoing, reason))

    def drain_notices(self) -> list[PeerNotice]:
        out, self.to_say = self.to_say, []
        return out

    def carries(self, peer: str, nbytes: int) -> bool:
        return peer in self.links

    def send(self, peer: str, ticket: int, arrays: Sequence[Array]) -> None:
        self.sent[peer, ticket] = arrays

    def expects(self, peer: str) -> bool:
        return peer in self.accepts

    def expect(self, peer: str, ticket: int, arrays: Sequence[Array]) -> None:
        assert all(array.data is None for array in arrays)
        self.expected.append((peer, ticket))

    def come(self, peer: str, ticket: int, arrays: Sequence[Array] = (), error: str = "") -> None:
        """Let a tensor arrive, or fail with `error`."""
        self.arrived.append(ArrivedTensor(peer, ticket, tuple(arrays), error))

    def drain_arrivals(self) -> list[ArrivedTensor]:
        out, self.arrived = self.arrived, []
        return out

    def remove_peer(self, peer: str) -> None:
        self.forgotten.append(peer)

    def state(self) -> Mapping[str, str]:
        return dict.fromkeys(self.links, "direct")

    def close(self) -> None:
        pass

    def hosted(self, array: Array) -> Array:
        return array

    def joined(self, pieces: Sequence[tuple[Array, int, int]]) -> Array:
        return joined_rows(pieces)

    def digest(self, array: Array) -> str:
        return f"{CHECKSUM}{sum(bytes(array.data)):x}"
