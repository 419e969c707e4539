"""Uvicorn's llhttp protocol with a bound on the size of headers and trailers.

Uvicorn bounds them only in its slower parser (h11).
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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
