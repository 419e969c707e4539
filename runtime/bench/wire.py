"""HTTP/1.1 as a client that loads a server needs it: little work per byte, for it may share the server's cores.

Connections are kept and carry one exchange at a time. What comes is handed over where it is read, so that no task has
to wake for a token; the bytes of one read come as one piece. Answers are parsed by llhttp (`httptools`). Knows nothing
of events or JSON.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Protocol

import httptools

#: Bytes of a status line and headers, at most.
_MOST_HEAD = 1 << 16


class Failed(Exception):
    """An exchange's end before its time. `kind`: connect, timeout, broken stream, or what a taker says."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Taker(Protocol):
    """Whom an answer is for. A `Failed` that `body` raises ends the exchange and comes out of it; `status` raises
    nothing.
    """

    def status(self, code: int) -> None: ...

    def body(self, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class HttpOrigin:
    """Where a server is. `tls` None: plain HTTP. `headers`: lines that go with every request, each with its end."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    headers: bytes = b""


class Wire:
    """Connections to one server. `patience`: seconds to connect; `silence`: seconds without a byte after which an
    exchange fails.
    """

    def __init__(self, origin: HttpOrigin, patience: float, silence: float) -> None:
        self._origin = origin
        self._patience = patience
        self._silence = silence
        self._idle: list[_Connection] = []

    async def exchange(self, what: bytes, body: bytes, taker: Taker) -> None:
        """Send a request (`what`: its method and target), hand over the answer, return at its end. Raises Failed."""
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
    """One answer while it comes: what llhttp calls, and the future that is done with it."""

    def __init__(self, taker: Taker, done: asyncio.Future[None]) -> None:
        self._taker = taker
        self._done = done
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._head = 0
        self._code = 0
        self._delimited = False
        self._complete = False
        #: Whether the connection may carry another exchange.
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
        """The server has hung up, which ends an answer whose length was not told."""
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

    # -- llhttp's; answers before the one that counts (1xx) are passed over ------------------------------------------

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
            self.keeps = self._delimited and bool(
                self._parser.should_keep_alive()
            )  # the parser knows it at this point only


class _Connection(asyncio.Protocol):
    """One connection, as asyncio calls it."""

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
        """One timer per exchange, not one per read."""
        while (left := self._heard + self._silence - self._loop.time()) > 0:
            await asyncio.sleep(left)
        answer.fail(Failed("timeout", f"nothing came for {self._silence:g} s"))

    # -- asyncio's -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # nobody asked
            self.reusable = False
            self.abort()
            return
        self._heard = self._loop.time()
        self._answer.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._answer is not None:
            self._answer.connection_lost()
