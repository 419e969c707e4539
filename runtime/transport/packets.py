"""Let messages of one peer pass a messenger by: their packets are read and sent elsewhere, and counted here.

Only where both ends are connected by packets (`transport.channels.seqpacket`) and nothing waits: then a message's
number says that it is the next one. What is read elsewhere and not understood there is put back, and the messenger
judges it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from runtime.chains import Array
from runtime.loans import PacketHead, PacketPlace
from runtime.messages import Message
from runtime.transport.channels.channel import DualChannel
from runtime.transport.channels.seqpacket import MAX_BYTES, lengths_of
from runtime.transport.peers import Peers
from runtime.transport.send_queue import SendQueue
from runtime.transport.wire import NUMBER_AT, encode

_NUMBER = struct.Struct("<Q")


class PacketLink:
    """One peer's packets, both ways. For the messenger's thread.

    Args:
        to: The connection in the channel.
        name: Name of the link that the peer's messages come from.
    """

    def __init__(self, channel: DualChannel, to: bytes, name: bytes, outbox: SendQueue, peers: Peers) -> None:
        self._channel, self._outbox, self._peers = channel, outbox, peers
        self.to, self.name = to, name

    def find_place(self) -> PacketPlace | None:
        """Return where the next packets come and go; None if messages may not pass the messenger by now."""
        through = None if self._channel.closed or self._outbox.waiting else self._channel.packets(self.to)
        due = self._peers.due(self.name)
        if through is None or due is None or due != through[1].due:
            return None
        end = through[0].end(self.to)
        return None if end is None else PacketPlace(end.fileno(), due, self._outbox.number)

    def send(self, head: PacketHead, data: bytes | memoryview) -> bool:
        """Send a message; False, with nothing sent, if it cannot go now. `data`: its arrays."""
        through = None if self._channel.closed or self._outbox.waiting else self._channel.packets(self.to)
        end = None if through is None else through[0].end(self.to)
        if end is None:
            return False
        try:
            end.sendmsg([numbered(head, self._outbox.number), data])
        except OSError:  # as `SeqpacketSocket.put`
            return False
        self._outbox.skip(1)
        return True

    def count(self, received: int, sent: int) -> None:
        """Count messages that were read and sent elsewhere, from `find_place` on."""
        through = self._channel.packets(self.to)
        if through is not None:
            through[1].due += received
        self._peers.skip(self.name, received)
        self._outbox.skip(sent)

    def put_back(self, packet: bytes) -> None:
        """Have the messenger read a packet, empty at the end of the connection."""
        through = self._channel.packets(self.to)
        if through is not None:
            through[0].put_back(self.to, packet)


def head_of(message: Message, arrays: Sequence[Array]) -> PacketHead | None:
    """Return a message's packet up to its arrays, which follow back to back; None if it is too long for one.

    Raises WireError for messages that the receiver would refuse.
    """
    frames = encode(0, message, arrays)
    if len(frames) > 2 or sum(map(len, frames)) > MAX_BYTES:
        return None
    lengths = lengths_of(frames)
    return PacketHead(lengths + bytes(frames[0]), len(lengths) + NUMBER_AT)


def numbered(head: PacketHead, number: int) -> bytearray:
    """Return the bytes of a head with this number."""
    data = bytearray(head.data)
    _NUMBER.pack_into(data, head.number_at, number)
    return data
