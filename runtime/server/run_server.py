"""Run an application on uvicorn, with a drain on SIGTERM or SIGINT and exit code 0 after it.

On the first signal the server stops listening, answers new requests on open connections with 503, and lets running ones
finish for up to `drain_seconds`. A second SIGINT ends it at once.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from runtime.config import ServerConfig
from runtime.server.capacity import Gate
from runtime.server.http_protocol import BoundedProtocol
from zoo.errors import InputError


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


def address_of(bound: socket.socket) -> str:
    """Return `http://host:port` of a bound socket, with the real port where 0 was requested."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """A uvicorn server that calls `ready` once it accepts connections and closes the gate when a signal stops it.

    Args:
        park: Awaited at the beginning of the shutdown.
    """

    def __init__(
        self, config: uvicorn.Config, gate: Gate, ready: Callable[[], None], park: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._park = park
        self._gate = gate
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Put durable requests down first: then their clients' connections end, and none is waited for."""
        await self._park()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._gate.closed = True
        super().handle_exit(sig, frame)


def make_server(app: FastAPI, config: ServerConfig, ready: Callable[[], None]) -> HttpServer:
    settings = uvicorn.Config(
        app,
        lifespan="on",
        ws="none",
        http=BoundedProtocol,
        access_log=False,  # `Guard` writes one line per request, without query strings
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
    )
    return HttpServer(settings, app.state.service.gate, ready, app.state.park)


def serve(app: FastAPI, config: ServerConfig, bound: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until stopped by a signal. Returns after the drain."""
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
