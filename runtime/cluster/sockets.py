"""The sockets of one post: how they are made, guarded and bounded, and how frames go into one without waiting."""

from __future__ import annotations

import re
import socket as plain
from collections.abc import Callable
from contextlib import suppress

import zmq

from runtime.cluster.keys import Doorkeeper, Keys
from runtime.cluster.wire import MAX_FRAME_BYTES, Frame

ADDRESS = re.compile(r"(?:ipc:///[^\0]{1,100}|tcp://[A-Za-z0-9_.:\[\]-]{3,255}|inproc://[A-Za-z0-9_.-]{1,100})")


#: Frames of fewer bytes are copied into the transport: what is not wakes a thread of ours when it has gone.
_COPIED_BYTES = 1 << 18


class Sockets:
    """Makes sockets. `keys`: the cluster's; needed, and used, for tcp only. `context`: shared; else one is made.

    `high_water`: messages that the transport itself holds for a peer, on each side.
    """

    def __init__(self, keys: Keys | None, context: zmq.Context[zmq.Socket[bytes]] | None, high_water: int) -> None:
        self._keys, self._high_water = keys, high_water
        self._own_context = context is None
        self._context = context if context is not None else zmq.Context()
        self._doorkeeper: Doorkeeper | None = None

    def bound(self, address: str) -> zmq.Socket[bytes]:
        """A ROUTER. Raises ValueError for an address that is none, for tcp without keys; zmq.ZMQError."""
        if not ADDRESS.fullmatch(address.replace("*", "0")):
            raise ValueError(f"{address!r} is no address to listen on")
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that connects again is let in: its numbers tell whether something was lost
        if address.startswith("tcp:"):
            self._doorkeeper = Doorkeeper(self._context, self._secrets())
            self._secrets().guard(socket)
        try:
            socket.bind(address)
        except zmq.ZMQError:
            socket.close()
            self.close()
            raise
        return socket

    def connected(self, address: str, who: bytes) -> zmq.Socket[bytes]:
        """A DEALER that says who it is."""
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, who)
        if address.startswith("tcp:"):
            self._secrets().introduce(socket)
        socket.connect(address)
        return socket

    def close(self) -> None:
        """Sockets are closed before."""
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        if self._own_context:
            self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set_hwm(self._high_water)
        socket.copy_threshold = _COPIED_BYTES
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        return socket

    def _secrets(self) -> Keys:
        if self._keys is None:
            raise ValueError("nothing goes over the network without the cluster's keys")
        return self._keys


class Bell:
    """Wakes a poller; `ring` is for any thread."""

    def __init__(self) -> None:
        self._bell, self._button = plain.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)

    def fileno(self) -> int:
        return self._bell.fileno()

    def ring(self) -> None:
        with suppress(BlockingIOError, OSError):  # full: it rings; closed: nobody listens
            self._button.send(b"\0")

    def quiet(self) -> None:
        with suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass

    def close(self) -> None:
        self._bell.close()
        self._button.close()


def waits(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there. (Asking costs less than an exception that says no.)"""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def putting(socket: zmq.Socket[bytes], to: bytes | None = None) -> Callable[[list[Frame]], bool]:
    """Into a socket without waiting; False where it has no room. Raises zmq.ZMQError if a peer is not there."""

    def put(frames: list[Frame]) -> bool:
        try:
            copied = sum(map(len, frames)) < _COPIED_BYTES  # at once, which is cheaper than a message of pyzmq's for each frame
            socket.send_multipart(frames if to is None else [to, *frames], zmq.NOBLOCK, copy=copied)
        except zmq.Again:
            return False
        return True

    return put
