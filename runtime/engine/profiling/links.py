"""Measure the time to move bytes: in host memory, between host and GPU, and to another process over loopback.

The other process is a bare Python interpreter, started here, that reads and acknowledges; it ends when its socket
closes. Independent of models.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from runtime.engine.profiling.measure import timed

#: Transfer sizes in bytes: small ones show the fixed cost of a transfer, large ones the bandwidth.
SIZES = (1 << 16, 1 << 20, 1 << 24)
_SECONDS = 20.0

#: Reads a length and that many bytes and answers one byte, until the socket closes.
_SINK = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) as s:
    while True:
        head = s.recv(8, socket.MSG_WAITALL)
        if len(head) < 8:
            break
        left = int.from_bytes(head, "little")
        while left:
            left -= len(s.recv(min(left, 1 << 20)))
        s.sendall(b"x")
"""


def measure_links(device: str) -> list[dict[str, Any]]:
    """Measure all links between this process, `device` and another process: {"a", "b", "seconds": {bytes: seconds}}."""
    links = [_link("host", "host", _copier("cpu", "cpu"), "cpu")]
    if device != "cpu":
        links += [
            _link("host", "device", _copier("cpu", device), device),
            _link("device", "host", _copier(device, "cpu"), device),
        ]
    return [*links, _loopback()]


def _link(a: str, b: str, mover: Callable[[int], Callable[[], object]], device: str) -> dict[str, Any]:
    return {"a": a, "b": b, "seconds": {str(size): timed(mover(size), device) for size in SIZES}}


def _copier(source: str, target: str) -> Callable[[int], Callable[[], object]]:
    def mover(size: int) -> Callable[[], object]:
        into, out = (
            torch.empty(size, dtype=torch.uint8, device=target),
            torch.ones(size, dtype=torch.uint8, device=source),
        )
        return lambda: into.copy_(out)

    return mover


def _loopback() -> dict[str, Any]:
    """Measure one transfer to another process, with its one-byte answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_SECONDS)
        child = subprocess.Popen([sys.executable, "-I", "-c", _SINK, str(server.getsockname()[1])])
        try:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(_SECONDS)
                return _link("host", "process", _sender(connection), "cpu")
        finally:
            child.terminate()
            child.wait(_SECONDS)


def _sender(connection: socket.socket) -> Callable[[int], Callable[[], object]]:
    def mover(size: int) -> Callable[[], object]:
        message = size.to_bytes(8, "little") + bytes(size)

        def send() -> None:
            connection.sendall(message)
            connection.recv(1)

        return send

    return mover
