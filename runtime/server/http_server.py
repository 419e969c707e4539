"""uvicorn's server and its llhttp protocol, with what they lack here.

The protocol bounds the size of headers and trailers, which uvicorn does only in its slower parser (h11). The server
calls back once it accepts connections, and parks durable requests when it stops.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from runtime.config import ServerConfig
from runtime.heap import settle_heap
from runtime.server.capacity import Gate

#: Bytes of a request line with headers, of trailers, and between two pieces of a body; the bound that h11 has.
MOST_HEAD = 1 << 16


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection that sends more than `MOST_HEAD` bytes without a complete message, headers or piece of a body.

    The application bounds bodies itself (`request_body.read_body`).
    """

    _unread = 0

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread <= MOST_HEAD or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response("The request's headers are too long.")
        else:  # in the middle of an answer: trailers, or the next request
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._unread = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()


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
            settle_heap()
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Put durable requests down first: then their clients' connections end, and none is waited for."""
        await self._park()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._gate.closed = True
        super().handle_exit(sig, frame)


def make_server(app: Starlette, config: ServerConfig, ready: Callable[[], None]) -> HttpServer:
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
    return HttpServer(settings, app.state.gate, ready, app.state.park)
