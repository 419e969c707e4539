"""Short messages between processes of one machine: from one's thread straight into the other's socket. One thread
wakes, and not three.

A message is a packet (`SOCK_SEQPACKET` of AF_UNIX): it goes whole and at once, or not at all. What does not go, since
it is long, or the other end has not read what came before, is for somebody else to carry
(`transport.channels.channel`), in what order, too. Nothing waits here.

    packet 0    of whoever connects: who it is
    packet n    lengths of the frames, and the frames

Sockets lie in a folder that only their owner can enter. Only where there is Linux (`AVAILABLE`): others have no such
packets, or no epoll.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

AVAILABLE = hasattr(select, "epoll") and hasattr(socket, "AF_UNIX") and hasattr(socket, "SOCK_SEQPACKET")
#: Longer messages do not go this way: they would hold up whoever sends while the kernel copies, and soon fill the other
#: end's queue.
MAX_BYTES = 1 << 17
#: Behind the path of the other socket.
SUFFIX = ".q"

_QUEUE_BYTES = 1 << 21
_MAX_FRAMES = 64
_MAX_WHO = 256
_MAX_ENDS = 4096
_COUNT = struct.Struct("=I")


class SeqpacketSocket:
    """One end of such a connection, or all that others made to one path: then `who` says which. For one thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._listener: socket.socket | None = None
        self._path = ""
        self._ends: dict[bytes, socket.socket] = {}
        #: By file: who it is (not yet known: None), and its socket.
        self._files: dict[int, tuple[bytes | None, socket.socket]] = {}

    def fileno(self) -> int:
        """Readable while there is something to `take`."""
        return self._epoll.fileno()

    def listen(self, path: str) -> None:
        """Let others connect. Raises OSError."""
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
        """Connect, and say who this is; false where nobody listens. The other end's name is empty here."""
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

    def put(self, who: bytes, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Hand a message over; false if it cannot go this way now."""
        end = self._ends.get(who)
        if end is None or len(frames) > _MAX_FRAMES or sum(map(len, frames)) > MAX_BYTES:
            return False
        head = struct.pack(f"={len(frames) + 1}I", len(frames), *map(len, frames))
        try:
            end.sendmsg([head, *frames])
        except (BlockingIOError, InterruptedError):
            return False
        except (
            OSError
        ):  # the other end has gone, or has no memory: whoever watches processes tells of the one, time of the other
            return False
        return True

    def receive(self, most: int) -> list[tuple[bytes, list[memoryview]]]:
        """What has come, about `most` messages at most, in order for each end."""
        out: list[tuple[bytes, list[memoryview]]] = []
        again = True
        while again and len(out) < most:
            again = False
            for file, _ in self._epoll.poll(0):
                known = self._files.get(file)
                if known is None:
                    again = self._accept()  # what they have sent already is there, too
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
        """Whether there were any to let in."""
        came = False
        while self._listener is not None:
            try:
                end, _ = self._listener.accept()
            except OSError:
                break
            if len(self._files) >= _MAX_ENDS:
                end.close()  # it takes the other way
                continue
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
            self._add(None, end)
            came = True
        return came

    def _name(self, end: socket.socket) -> bool:
        """Hear who it is; whether it said so. Whoever connects again is let in: what it says tells whether something
        was lost.
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
            frames = _frames(packet)
            if frames is None:  # it has gone, or speaks otherwise
                self._remove_end(who)
                break
            out.append((who, frames))
        return out


_NOTHING = bytearray(1)
#: How long the next packet is, without taking it.
_LOOK = getattr(socket, "MSG_PEEK", 0) | getattr(socket, "MSG_TRUNC", 0)


def _plain() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
    return made


def _frames(packet: bytes) -> list[memoryview] | None:
    """The frames of a packet; None if it is none."""
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
