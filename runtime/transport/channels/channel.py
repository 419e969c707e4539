"""What carries messages, as frames: to one peer and from it, or to all that have connected to one address and from
them.

    Road      a socket of pyzmq: takes everything, in threads of its own
    DualChannel   short messages over `transport.channels.seqpacket`, and over a road what that does not take; put back
                  in order by their numbers

Contract: for one thread; nothing waits. `put` hands a message over whole or says that there is no room. Each end
hears in order what it is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from runtime.transport.channels.seqpacket import SeqpacketSocket
from runtime.transport.wire import Frame, number_of

#: Frames of fewer bytes are copied into the transport: what is not wakes a thread of ours when it has gone.
COPIED_BYTES = 1 << 18
#: Messages taken of one carrier before the others have their turn.
_BURST = 256
#: Messages of one end that may be ahead of one that is under way, and how long they wait for it, in seconds. Then they
#: come as they are, and whoever counts sees what is missing.
_MOST_AHEAD = 4096
_LONGEST = 10.0

#: Who it is from, empty where there is but one who could be; and its frames.
Came = tuple[bytes, list[memoryview]]


class Channel(Protocol):
    @property
    def polled(self) -> Iterable[zmq.Socket[bytes] | int]:
        """What a poller is to look at."""
        ...

    @property
    def late(self) -> bool:
        """Whether there is something to take that no poller tells of."""
        ...

    @property
    def closed(self) -> bool: ...

    def put(self, frames: list[Frame], to: bytes = b"") -> bool:
        """False where there is no room. Raises zmq.ZMQError if whom it is for is not there."""
        ...

    def receive(self) -> Iterator[Came]:
        """What is there. Not to be gone on with once it is closed."""
        ...

    def close(self, linger_ms: int) -> None:
        """What was put may still go out for so long."""
        ...


class ZmqChannel:
    """A socket of pyzmq. `named`: of several others (a ROUTER), who are known by name."""

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
            copied = (
                sum(map(len, frames)) < COPIED_BYTES
            )  # at once, which is cheaper than a message of pyzmq's for each frame
            self._socket.send_multipart([to, *frames] if self._named else frames, zmq.NOBLOCK, copy=copied)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Iterator[Came]:
        for _ in range(_BURST):
            # asking whether there is one costs less than an exception that says no
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            frames = [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
            yield (bytes(frames.pop(0)) if self._named else b""), frames

    def close(self, linger_ms: int) -> None:
        self._socket.close(linger_ms)


@dataclass(slots=True)
class ReorderBuffer:
    """Puts one end's messages back in order. `due`: the number that is next; `ahead`: what came before its turn;
    `since`: when the first of these did."""

    due: int = 0
    ahead: dict[int, list[memoryview]] = field(default_factory=dict)
    since: float = 0.0

    def put_in_order(self, number: int | None, frames: list[memoryview], now: float) -> list[list[memoryview]]:
        """What may be heard now. What has no number, or an old one, is for whoever hears it to judge."""
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
        return bool(self.ahead) and now - self.since > _LONGEST

    def all(self) -> list[list[memoryview]]:
        """Whatever came before its turn, and what is between did not come."""
        out = [self.ahead[number] for number in sorted(self.ahead)]
        self.due = max(self.ahead, default=self.due - 1) + 1
        self.ahead.clear()
        return out


class DualChannel:
    """See the top of the file. Messages carry their numbers (`transport.wire`); whoever has not connected both ways is
    heard as he comes.
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
        return any(order.ahead and order.late(self._clock()) for order in self._orders.values())

    @property
    def closed(self) -> bool:
        return self._channel.closed

    def put(self, frames: list[Frame], to: bytes = b"") -> bool:
        return self._seqpacket.put(to, frames) or self._channel.put(frames, to)

    def receive(self) -> Iterator[Came]:
        yield from self._short()
        for who, frames in self._channel.receive():
            yield from self._short()  # what was sent before it has come, as far as it went that way
            yield from self._in_order(who, frames)
        for who, order in list(self._orders.items()):
            if order.ahead and order.late(self._clock()):
                yield from ((who, frames) for frames in order.all())
            if not order.ahead and not self._seqpacket.has(who):
                self._orders.pop(who, None)

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
