"""HTTP as uvicorn reads it with llhttp, with an end to what is neither body nor message: uvicorn bounds that for its
slower parser only.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Bytes of a request's line and headers, of its trailers, and between two pieces of its body: as many as h11 takes.
MOST_HEAD = 1 << 16


class BoundedProtocol(HttpToolsProtocol):
    """Counts what has come since there was last something for the application, which bounds bodies itself."""

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
