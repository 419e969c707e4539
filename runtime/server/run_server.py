"""Run an application on uvicorn, with a drain on SIGTERM or SIGINT and exit code 0 after it.

On the first signal the server stops listening, answers new requests on open connections with 503, and lets running ones
finish for up to `drain_seconds`. A second SIGINT ends it at once.

uvicorn and fastapi are imported only by `serve`, so that a port can be bound before.
"""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zoo.errors import InputError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from runtime.config import ServerConfig
    from runtime.server.http_server import HttpServer


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, so that a port in use is reported before any model is loaded.

    Raises InputError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot listen on {host}:{port}: {error}") from None
    return bound


def is_local(bound: socket.socket) -> bool:
    """Return whether only this machine reaches a bound socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def address_of(bound: socket.socket) -> str:
    """Return `http://host:port` of a bound socket, with the real port where 0 was requested."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: Starlette, config: ServerConfig, bound: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until stopped by a signal. Returns after the drain."""
    from runtime.server.http_server import make_server

    server = make_server(app, config, ready)
    with _outlived_signals(server):
        server.run(sockets=[bound])


@contextmanager
def _outlived_signals(server: HttpServer) -> Iterator[None]:
    """Install the server's signal handlers for the duration of the block.

    After its shutdown uvicorn raises the captured signals once more for the handlers from before. The default ones
    would end the process with the signal's exit code; a drained server must exit with 0.
    """
    before = {sig: signal.signal(sig, server.handle_exit) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
