"""Carry messages as frames, to and from one peer, or all peers that connected to one address.

    ZmqChannel    a pyzmq socket: takes messages of any size, with threads of its own
    DualChannel   short messages over `transport.channels.seqpacket`, the rest over a ZmqChannel; the message numbers
                  restore the order

For one thread; no call waits. `put` takes a message whole or reports that there is no room. Each end receives its
messages in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from runtime.transport.channels.seqpacket import SeqpacketSocket
from runtime.transport.wire import Frame, number_of

#: Shorter messages are copied into pyzmq; sending without a copy wakes a thread of this process once it is sent.
COPIED_BYTES = 1 << 18
#: Messages received from one channel before the next channel's turn.
_BURST = 256
#: Most messages of a peer that may wait for one still under way, and how long they wait, in seconds. After that they
#: are delivered as they are, and the messenger detects the gap in the numbers.
_MOST_AHEAD = 4096
_LONGEST = 10.0

#: (link of the sender, empty if the channel has one peer only; frames of the message).
Came = tuple[bytes, list[memoryview]]


class Channel(Protocol):
    """Define a channel that carries frames."""

    @property
    def polled(self) -> Iterable[zmq.Socket[bytes] | int]:
        """Return the sockets or file descriptors to poll."""
        ...

    @property
    def late(self) -> bool:
        """Return whether messages are due that no poller reports."""
        ...

    @property
    def closed(self) -> bool: ...

    def put(self, frames: list[Frame], to: bytes = b"") -> bool:
        """Send a message; False if there is no room. Raises zmq.ZMQError if the receiver is not connected."""
        ...

    def receive(self) -> Iterator[Came]:
        """Yield the available messages. Stop iterating once the channel is closed."""
        ...

    def close(self, linger_ms: int) -> None:
        """Close the channel; queued messages may still be sent for `linger_ms`."""
        ...


class ZmqChannel:
    """Carry messages over a pyzmq socket.

    `named`: the socket is a ROUTER with several peers, identified by link name.
    """

    late = False

    def __init__(self, socket: zmq.Socket[bytes], *, named: bool) -> None:
        self._socket, self._named = socket, named

    @property
    def polled(self) -> tuple[zmq.Socket[bytes]]:
        return (self._socket,)

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def put(self, frames: list[Frame], to: bytes = b"") -> bool:
        try:
            copied = sum(map(len, frames)) < COPIED_BYTES  # a copy is cheaper than a pyzmq message object per frame
            self._socket.send_multipart([to, *frames] if self._named else frames, zmq.NOBLOCK, copy=copied)
        except zmq.Again:
            return False
        return True

    def quiet_file(self) -> int | None:
        """Return the descriptor that becomes readable with the next event; None if a message is there."""
        return None if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN else int(self._socket.getsockopt(zmq.FD))

    def receive(self) -> Iterator[Came]:
        for _ in range(_BURST):
            # checking first is cheaper than an exception
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            frames = [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
            yield (bytes(frames.pop(0)) if self._named else b""), frames

    def close(self, linger_ms: int) -> None:
        self._socket.close(linger_ms)


@dataclass(slots=True)
class ReorderBuffer:
    """Put one peer's messages back in order.

    Fields:
        due: Number of the next message.
        ahead: Messages that arrived before their turn.
        since: When the first of these arrived, or the last message was delivered, in seconds.
    """

    due: int = 0
    ahead: dict[int, list[memoryview]] = field(default_factory=dict)
    since: float = 0.0

    def put_in_order(self, number: int | None, frames: list[memoryview], now: float) -> list[list[memoryview]]:
        """Add a message and return the messages that can be delivered now.

        A message without a number, or with an old one, is delivered at once; the messenger judges it.
        """
        if number is None or number < self.due:
            return [frames]
        if number > self.due:
            if not self.ahead:
                self.since = now
            self.ahead[number] = frames
            return [] if len(self.ahead) < _MOST_AHEAD else self.all()
        out = [frames]
        self.due += 1
        while self.due in self.ahead:
            out.append(self.ahead.pop(self.due))
            self.due += 1
        self.since = now
        return out

    def late(self, now: float) -> bool:
        """Return whether a missing message is overdue."""
        return bool(self.ahead) and now - self.since > _LONGEST

    def all(self) -> list[list[memoryview]]:
        """Return all messages that wait, although those between them are missing."""
        out = [self.ahead[number] for number in sorted(self.ahead)]
        self.due = max(self.ahead, default=self.due - 1) + 1
        self.ahead.clear()
        return out


class DualChannel:
    """Carry short messages over SEQPACKET sockets and the rest over pyzmq.

    Messages are ordered by their numbers (`transport.wire`). Messages of a peer that is not connected over SEQPACKET
    are delivered as they arrive.
    """

    def __init__(
        self, channel: ZmqChannel, seqpacket: SeqpacketSocket, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel, self._seqpacket, self._clock = channel, seqpacket, clock
        self._orders: dict[bytes, ReorderBuffer] = {}

    @property
    def polled(self) -> tuple[zmq.Socket[bytes] | int, ...]:
        return (self._seqpacket.fileno(), *self._channel.polled)

    @property
    def late(self) -> bool:
        return self._seqpacket.has_kept or any(
            order.ahead and order.late(self._clock()) for order in self._orders.values()
        )

    @property
    def closed(self) -> bool:
        return self._channel.closed

    def put(self, frames: list[Frame], to: bytes = b"") -> bool:
        return self._seqpacket.put(to, frames) or self._channel.put(frames, to)

    def receive(self) -> Iterator[Came]:
        yield from self._short()
        for who, frames in self._channel.receive():
            yield from self._short()  # short messages sent before this one have arrived
            yield from self._in_order(who, frames)
        for who, order in list(self._orders.items()):
            if order.ahead and order.late(self._clock()):
                yield from ((who, frames) for frames in order.all())
            if not order.ahead and not self._seqpacket.has(who):
                self._orders.pop(who, None)

    def packets(self, who: bytes) -> tuple[SeqpacketSocket, ReorderBuffer] | None:
        """Return what the packets of a link come and go through; None if there are none, or one is waited for."""
        order = self._orders.get(who)
        if not self._seqpacket.has(who) or self._seqpacket.has_kept or (order is not None and order.ahead):
            return None
        return self._seqpacket, order or self._orders.setdefault(who, ReorderBuffer())

    def quiet_files(self, apart: Container[bytes]) -> list[int] | None:
        """Return the descriptors to poll for messages of all links but these; None if some are due now."""
        if self.late or (quiet := self._channel.quiet_file()) is None:
            return None
        return [quiet, *self._seqpacket.files_apart(apart)]

    def close(self, linger_ms: int) -> None:
        self._seqpacket.close()
        self._channel.close(linger_ms)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _short(self) -> Iterator[Came]:
        for who, frames in self._seqpacket.receive(_BURST):
            if who not in self._orders:
                self._orders[who] = ReorderBuffer()
            yield from self._in_order(who, frames)

    def _in_order(self, who: bytes, frames: list[memoryview]) -> Iterator[Came]:
        order = self._orders.get(who)
        if order is None and self._seqpacket.has(who):
            order = self._orders[who] = ReorderBuffer()
        if order is None:
            yield who, frames
        else:
            yield from ((who, each) for each in order.put_in_order(number_of(frames), frames, self._clock()))
