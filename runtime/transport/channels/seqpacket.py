"""Send short messages between processes of one machine over a Unix SEQPACKET socket.

One thread wakes in the receiver per message; pyzmq would wake three. A message is one packet, sent whole and at once or
not at all. A message that is too long, or that finds the receiver's queue full, is sent by the other channel
(`transport.channels.channel`), which also restores the order. No call waits.

    packet 0    name of the connecting link
    packet n    lengths of the frames, then the frames

The sockets lie in a folder that only their owner can enter. Linux only (`AVAILABLE`): other systems lack these packets
or epoll.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path

AVAILABLE = hasattr(select, "epoll") and hasattr(socket, "AF_UNIX") and hasattr(socket, "SOCK_SEQPACKET")
#: Longest message: larger ones would delay the sender while the kernel copies, and fill the receiver's queue.
MAX_BYTES = 1 << 17
#: Suffix added to the path of the pyzmq socket.
SUFFIX = ".q"

_QUEUE_BYTES = 1 << 21
_MAX_FRAMES = 64
#: Longest packet.
PACKET_BYTES = MAX_BYTES + 4 * (_MAX_FRAMES + 1)
_MAX_WHO = 256
_MAX_ENDS = 4096
_COUNT = struct.Struct("=I")


class SeqpacketSocket:
    """Hold one end of a connection, or all connections made to one path, by link name. For one thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._listener: socket.socket | None = None
        self._path = ""
        self._ends: dict[bytes, socket.socket] = {}
        #: By file descriptor: link name (None until received) and socket.
        self._files: dict[int, tuple[bytes | None, socket.socket]] = {}
        #: Packets that were read past `receive`, by link name.
        self._kept: list[tuple[bytes, bytes]] = []

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to `receive`."""
        return self._epoll.fileno()

    def listen(self, path: str) -> None:
        """Accept connections at a path. Raises OSError."""
        Path(path).unlink(missing_ok=True)
        listener = _plain()
        try:
            listener.bind(path)
            listener.listen(_MAX_ENDS)
        except OSError:
            listener.close()
            raise
        self._listener, self._path = listener, path
        self._epoll.register(listener, select.EPOLLIN)

    def dial(self, path: str, who: bytes) -> bool:
        """Connect and send the name of the link; False if nothing listens. The other end's name is empty here."""
        end = _plain()
        try:
            end.connect(path)
            end.send(who)
        except OSError:
            end.close()
            return False
        self._ends[b""] = end
        self._add(b"", end)
        return True

    def has(self, who: bytes) -> bool:
        return who in self._ends

    def end(self, who: bytes) -> socket.socket | None:
        """Return a connection, from which packets may be read and sent past this object."""
        return self._ends.get(who)

    def files_apart(self, ends: Container[bytes]) -> list[int]:
        """Return the descriptors of the listener and of all connections but these."""
        mine = [] if self._listener is None else [self._listener.fileno()]
        return [*mine, *(file for file, (who, _) in self._files.items() if who is None or who not in ends)]

    def put_back(self, who: bytes, packet: bytes) -> None:
        """Return a packet that was read past this object to the next `receive`, before what came behind it."""
        self._kept.append((who, packet))

    @property
    def has_kept(self) -> bool:
        """Return whether packets were put back."""
        return bool(self._kept)

    def put(self, who: bytes, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Send a message; False if it cannot go over this socket now."""
        end = self._ends.get(who)
        if end is None or len(frames) > _MAX_FRAMES or sum(map(len, frames)) > MAX_BYTES:
            return False
        head = lengths_of(frames)
        try:
            end.sendmsg([head, *frames])
        except (BlockingIOError, InterruptedError):
            return False
        except (
            OSError
        ):  # the other end is gone, which its supervisor detects, or it has no memory, and the message goes over pyzmq
            return False
        return True

    def receive(self, most: int) -> list[tuple[bytes, list[memoryview]]]:
        """Return the received messages, about `most` of them, in order per connection."""
        out: list[tuple[bytes, list[memoryview]]] = []
        kept, self._kept = self._kept, []
        for who, packet in kept:
            self._add_packet(who, packet, out)
        again = True
        while again and len(out) < most:
            again = False
            for file, _ in self._epoll.poll(0):
                known = self._files.get(file)
                if known is None:
                    again = self._accept()  # their first packets may be there already
                elif known[0] is None:
                    again |= self._name(known[1])
                else:
                    out += self._read(known[0], known[1], most)
        return out

    def close(self) -> None:
        for _, end in self._files.values():
            end.close()
        self._files.clear()
        self._ends.clear()
        if self._listener is not None:
            self._listener.close()
            with suppress(OSError):
                Path(self._path).unlink()
        self._epoll.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _accept(self) -> bool:
        """Accept waiting connections; return whether there were any."""
        came = False
        while self._listener is not None:
            try:
                end, _ = self._listener.accept()
            except OSError:
                break
            if len(self._files) >= _MAX_ENDS:
                end.close()  # it uses pyzmq only
                continue
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
            self._add(None, end)
            came = True
        return came

    def _name(self, end: socket.socket) -> bool:
        """Read the link's name; return whether it has come.

        A link that connects again is accepted: message numbers reveal whether a message was lost.
        """
        try:
            who = end.recv(_MAX_WHO)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            who = b""
        if who:
            self._remove_end(who)
            self._ends[who] = end
            self._files[end.fileno()] = who, end
        else:
            self._close_end(end)
        return bool(who)

    def _add(self, who: bytes | None, end: socket.socket) -> None:
        self._files[end.fileno()] = who, end
        self._epoll.register(end, select.EPOLLIN)

    def _close_end(self, end: socket.socket) -> None:
        del self._files[end.fileno()]
        self._epoll.unregister(end)
        end.close()

    def _remove_end(self, who: bytes) -> None:
        end = self._ends.pop(who, None)
        if end is not None:
            self._close_end(end)

    def _read(self, who: bytes, end: socket.socket, most: int) -> list[tuple[bytes, list[memoryview]]]:
        out: list[tuple[bytes, list[memoryview]]] = []
        while len(out) < most:
            try:
                size = end.recv_into(_NOTHING, 0, _LOOK)
                packet = end.recv(size) if size else b""
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                packet = b""
            if not self._add_packet(who, packet, out):
                break
        return out

    def _add_packet(self, who: bytes, packet: bytes, out: list[tuple[bytes, list[memoryview]]]) -> bool:
        """Add a packet's frames to `out`; return whether the connection stays."""
        frames = _frames(packet)
        if frames is None:  # closed, or not a valid packet
            self._remove_end(who)
            return False
        out.append((who, frames))
        return True


_NOTHING = bytearray(1)
#: Flags that return the length of the next packet without removing it.
_LOOK = getattr(socket, "MSG_PEEK", 0) | getattr(socket, "MSG_TRUNC", 0)


def _plain() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
    return made


def lengths_of(frames: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """Return the first bytes of a packet."""
    return struct.pack(f"={len(frames) + 1}I", len(frames), *map(len, frames))


def _frames(packet: bytes) -> list[memoryview] | None:
    """Return the frames of a packet, or None if it is malformed."""
    if len(packet) < _COUNT.size:
        return None
    (count,) = _COUNT.unpack_from(packet)
    at = _COUNT.size * (count + 1)
    if not 0 < count <= _MAX_FRAMES or len(packet) < at:
        return None
    whole, frames = memoryview(packet), []
    for length in struct.unpack_from(f"={count}I", packet, _COUNT.size):
        frames.append(whole[at : at + length])
        at += length
    return frames if at == len(packet) else None
