"""Create the sockets of one messenger, with authentication and limits.

tcp://      over the network, with the cluster's keys
ipc://      between processes of one machine
unix://     the same, with short messages over SEQPACKET sockets (`transport.channels.seqpacket`)
inproc://   between threads of a process
"""

from __future__ import annotations

import re
import socket as plain
from contextlib import suppress

import zmq

from runtime.transport.channels.channel import COPIED_BYTES, Channel, DualChannel, ZmqChannel
from runtime.transport.channels.seqpacket import AVAILABLE, SUFFIX, SeqpacketSocket
from runtime.transport.keys import Authenticator, Keys
from runtime.transport.wire import MAX_FRAME_BYTES

ADDRESS = re.compile(
    r"(?:(?:ipc|unix):///[^\0]{1,100}|tcp://[A-Za-z0-9_.:\[\]-]{3,255}|inproc://[A-Za-z0-9_.-]{1,100})"
)
_UNIX, _IPC = "unix://", "ipc://"


class Sockets:
    """Create sockets.

    Args:
        keys: The cluster's keys; required and used for tcp only.
        context: Shared ZeroMQ context; None creates one.
        high_water: Messages that the transport holds for a peer, on each side.
    """

    def __init__(self, keys: Keys | None, context: zmq.Context[zmq.Socket[bytes]] | None, high_water: int) -> None:
        self._keys, self._high_water = keys, high_water
        self._own_context = context is None
        self._context = context if context is not None else zmq.Context()
        self._authenticator: Authenticator | None = None

    def bound(self, address: str) -> tuple[Channel, str]:
        """Return a channel that peers connect to, and its address.

        Raises ValueError for an invalid address, or for tcp without keys; zmq.ZMQError.
        """
        if not ADDRESS.fullmatch(address.replace("*", "0")):
            raise ValueError(f"{address!r} is no address to listen on")
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(
            zmq.ROUTER_HANDOVER, 1
        )  # accept a peer that connects again: message numbers reveal whether a message was lost
        if address.startswith("tcp:"):
            self._authenticator = Authenticator(self._context, self._secrets())
            self._secrets().guard(socket)
        try:
            socket.bind(_slow(address))
        except zmq.ZMQError:
            socket.close()
            self.close()
            raise
        if address.startswith(_UNIX) and AVAILABLE:
            seqpacket = SeqpacketSocket()
            with suppress(OSError):  # peers then find no listener and use pyzmq
                seqpacket.listen(address.removeprefix(_UNIX) + SUFFIX)
            return DualChannel(ZmqChannel(socket, named=True), seqpacket), address
        return ZmqChannel(socket, named=True), socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def connected(self, address: str, who: bytes) -> Channel:
        """Return a channel to one peer, which identifies this process by the link's name."""
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, who)
        if address.startswith("tcp:"):
            self._secrets().introduce(socket)
        socket.connect(_slow(address))
        channel = ZmqChannel(socket, named=False)
        if address.startswith(_UNIX) and AVAILABLE:
            seqpacket = SeqpacketSocket()
            if seqpacket.dial(address.removeprefix(_UNIX) + SUFFIX, who):
                return DualChannel(channel, seqpacket)
            seqpacket.close()
        return channel

    def close(self) -> None:
        """Close the context and the authenticator. The channels must be closed before."""
        if self._authenticator is not None:
            self._authenticator.close()
        if self._own_context:
            self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set_hwm(self._high_water)
        socket.copy_threshold = COPIED_BYTES
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        return socket

    def _secrets(self) -> Keys:
        if self._keys is None:
            raise ValueError("nothing goes over the network without the cluster's keys")
        return self._keys


class Waker:
    """Wake a poller; `ring` may be called from any thread."""

    def __init__(self) -> None:
        self._waker, self._button = plain.socketpair()
        self._waker.setblocking(False)
        self._button.setblocking(False)

    def fileno(self) -> int:
        return self._waker.fileno()

    def ring(self) -> None:
        with suppress(BlockingIOError, OSError):  # full: already ringing; closed: nothing to wake
            self._button.send(b"\0")

    def quiet(self) -> None:
        with suppress(BlockingIOError):
            while self._waker.recv(4096):
                pass

    def close(self) -> None:
        self._waker.close()
        self._button.close()


def _slow(address: str) -> str:
    return _IPC + address.removeprefix(_UNIX) if address.startswith(_UNIX) else address
