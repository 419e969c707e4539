"""Parse `multipart/form-data` (RFC 7578) piece by piece, so that an upload is never held as a whole.

Contract: `feed` takes a body in pieces cut anywhere and returns what they complete: a `FormPart` where a part begins,
then its bytes. Memory is bounded by `MOST_HEAD` and the piece. Bodies that break the grammar raise RequestError 400.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message

from runtime.frontend.errors import RequestError

#: Bytes of the headers of a part.
MOST_HEAD = 8192
#: Parts of a form.
MOST_PARTS = 32
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")


@dataclass(frozen=True, slots=True)
class FormPart:
    """The beginning of a part. `filename` is None for a plain field."""

    name: str
    filename: str | None


class MultipartParser:
    """Parse one form. `boundary`: from `boundary_of`."""

    def __init__(self, boundary: str) -> None:
        self._mark = b"\r\n--" + boundary.encode("ascii")
        #: What has not been passed on; the body's first boundary has no line break before it.
        self._held = bytearray(b"\r\n")
        self._inside = False
        self._parts = 0
        self.ended = False

    def feed(self, data: bytes) -> Iterator[FormPart | bytes]:
        """Yield parts and their bytes, in order. Raises RequestError 400."""
        self._held += data
        while not self.ended:
            at = self._held.find(self._mark)
            if at < 0:
                # The end of what is held may be the beginning of a boundary.
                kept = min(len(self._held), len(self._mark) - 1)
                if self._inside and len(self._held) > kept:
                    yield bytes(self._held[: len(self._held) - kept])
                del self._held[: len(self._held) - kept]
                return
            if self._inside and at:
                yield bytes(self._held[:at])
            del self._held[:at]
            self._inside = False
            part = self._next_part()
            if part is None:
                return
            self._inside = True
            yield part

    def _next_part(self) -> FormPart | None:
        """Take a boundary and the headers behind it; None if they are not complete yet, or the form has ended."""
        begin = len(self._mark)
        if len(self._held) < begin + 2:
            return None
        if self._held[begin : begin + 2] == b"--":
            self.ended = True
            self._held.clear()
            return None
        line = self._held.find(b"\r\n", begin)
        head = self._held.find(b"\r\n\r\n", line) if line >= 0 else -1
        if head < 0:
            if len(self._held) > MOST_HEAD:
                raise _malformed("the headers of a part are too long")
            return None
        if self._held[begin:line].strip(b" \t"):
            raise _malformed("there is text behind a boundary")
        if head - line > MOST_HEAD or self._parts >= MOST_PARTS:
            raise _malformed("too many parts, or their headers are too long")
        part = _part_of(bytes(self._held[line + 2 : head]))
        self._parts += 1
        del self._held[: head + 4]
        return part


def boundary_of(content_type: str) -> str:
    """Return the boundary of a form. Raises RequestError: 415 for another type of body, 400 without a boundary."""
    message = Message()
    message["content-type"] = content_type.replace("\r", "").replace("\n", "")
    if message.get_content_type() != "multipart/form-data":
        raise RequestError("A file is uploaded as multipart/form-data.", status=415)
    boundary = message.get_param("boundary")
    if not isinstance(boundary, str) or not _BOUNDARY.fullmatch(boundary):
        raise _malformed("the boundary is missing or invalid")
    return boundary


def _part_of(head: bytes) -> FormPart:
    message = Message()
    for line in head.decode("utf-8", "replace").split("\r\n"):
        header, colon, value = line.partition(":")
        if not colon:
            raise _malformed("a header of a part has no colon")
        if header.strip().lower() == "content-disposition":
            message["content-disposition"] = value.strip().replace("\n", "").replace("\r", "")
    name = message.get_param("name", header="content-disposition")
    if message.get_content_disposition() != "form-data" or not isinstance(name, str):
        raise _malformed("a part has no name")
    return FormPart(name, message.get_filename())


def _malformed(why: str) -> RequestError:
    return RequestError(f"The form cannot be read: {why}.", code="invalid_form")
