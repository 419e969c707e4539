"""A minimal HTTP/1.1 client for load tests, with little CPU time per byte: it may share the server's cores.

Connections are reused and carry one exchange at a time. Received bytes are passed on in the read callback, so that no
task wakes per token; the bytes of one read form one piece. Answers are parsed by llhttp (`httptools`). Nothing here
depends on events or JSON.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Protocol

import httptools

#: Maximum bytes of a status line and headers.
_MOST_HEAD = 1 << 16


class Failed(Exception):
    """A failed exchange. `kind` is connect, timeout, broken stream, or what a `Taker` raised."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Taker(Protocol):
    """Receives one answer.

    A `Failed` raised by `body` ends the exchange, which raises it. `status` must not raise.
    """

    def status(self, code: int) -> None: ...

    def body(self, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class HttpOrigin:
    """The address of a server.

    Fields:
        tls: TLS context, None for plain HTTP.
        headers: Header lines sent with every request, each with its line end.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    headers: bytes = b""


class Wire:
    """A pool of connections to one server.

    `patience` is the limit to connect and `silence` the longest time without a byte, both in seconds.
    """

    def __init__(self, origin: HttpOrigin, patience: float, silence: float) -> None:
        self._origin = origin
        self._patience = patience
        self._silence = silence
        self._idle: list[_Connection] = []

    async def exchange(self, what: bytes, body: bytes, taker: Taker) -> None:
        """Send a request (`what` is its method and target), pass the answer to `taker` and return at its end.

        Raises Failed.
        """
        connection = self._idle_connection() or await self._new_connection()
        length = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body) if body else b""
        try:
            await connection.exchange(b"%b HTTP/1.1\r\n%b%b\r\n%b" % (what, self._origin.headers, length, body), taker)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.abort()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    def _idle_connection(self) -> _Connection | None:
        while self._idle:
            if (kept := self._idle.pop()).reusable:
                return kept
        return None

    async def _new_connection(self) -> _Connection:
        origin, loop = self._origin, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._patience):
                _, made = await loop.create_connection(
                    lambda: _Connection(loop, self._silence), origin.host, origin.port, ssl=origin.tls
                )
                return made
        except TimeoutError:
            raise Failed("connect", f"no connection within {self._patience:g} s") from None
        except OSError as error:
            raise Failed("connect", str(error)) from None


class _Answer:
    """Parser callbacks of one answer, and the future that completes with it."""

    def __init__(self, taker: Taker, done: asyncio.Future[None]) -> None:
        self._taker = taker
        self._done = done
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._head = 0
        self._code = 0
        self._delimited = False
        self._complete = False
        #: Whether the connection can carry another exchange.
        self.keeps = False

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
            if self._pieces:
                self._taker.body(b"".join(self._pieces))
                self._pieces.clear()
            self._bound(len(data))
        except httptools.HttpParserError as error:
            self.fail(Failed("broken stream", f"no HTTP: {error}"))
        except Failed as error:
            self.fail(error)
        if self._complete and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self) -> None:
        """Handle the end of the connection, which completes an answer without a declared length."""
        if self._code >= 200 and not self._delimited and not self._done.done():
            self._done.set_result(None)
        self.fail(Failed("broken stream", "the server hung up before the end of its answer"))

    def fail(self, error: Failed) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    def _bound(self, size: int) -> None:
        self._head += size if self._code < 200 else 0
        if self._head > _MOST_HEAD:
            raise Failed("broken stream", f"headers are longer than {_MOST_HEAD:,} bytes")

    # -- callbacks of llhttp; informational answers (1xx) are skipped ------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._delimited = self._delimited or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        if self._code < 200:
            self._code = self._parser.get_status_code()
            if self._code >= 200:
                self._taker.status(self._code)

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._code >= 200 and not self._complete:
            self._complete = True
            self.keeps = self._delimited and bool(self._parser.should_keep_alive())  # defined at this point only


class _Connection(asyncio.Protocol):
    """One connection as an asyncio protocol."""

    def __init__(self, loop: asyncio.AbstractEventLoop, silence: float) -> None:
        self._loop = loop
        self._silence = silence
        self._heard = 0.0
        self._answer: _Answer | None = None
        self.reusable = False

    async def exchange(self, request: bytes, taker: Taker) -> None:
        done = self._loop.create_future()
        answer = self._answer = _Answer(taker, done)
        self.reusable, self._heard = False, self._loop.time()
        self._transport.write(request)
        watch = asyncio.ensure_future(self._watch(answer))
        try:
            await done
            self.reusable = answer.keeps and not self._transport.is_closing()
        finally:
            self._answer = None
            watch.cancel()

    def abort(self) -> None:
        self._transport.abort()

    async def _watch(self, answer: _Answer) -> None:
        """Fail the answer after too long without a byte. One timer per exchange, not one per read."""
        while (left := self._heard + self._silence - self._loop.time()) > 0:
            await asyncio.sleep(left)
        answer.fail(Failed("timeout", f"nothing came for {self._silence:g} s"))

    # -- callbacks of asyncio ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # no exchange is in progress
            self.reusable = False
            self.abort()
            return
        self._heard = self._loop.time()
        self._answer.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._answer is not None:
            self._answer.connection_lost()
