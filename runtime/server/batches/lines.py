"""The lines of a batch's input file: `{"custom_id", "method", "url", "body"}`, one JSON object per line.

Contract: `LineCheck` takes every line in order and keeps 32 bytes of each; it refuses the file if any line is wrong,
and names the first wrong ones. The schemas of the routes check bodies. Nothing here reads files or runs models.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

from runtime.frontend.apis.embeddings import EmbeddingBody
from runtime.frontend.apis.responses import ResponseBody
from runtime.frontend.errors import RequestError, unsupported
from runtime.frontend.schemas import ChatBody, CompletionBody, GeneratingBody, ServedBody, parse

MOST_CUSTOM_ID = 512
#: Errors that are reported; one is enough to refuse a file.
MOST_ERRORS = 100

#: The routes that a batch may be for, each with the model of its bodies.
ENDPOINTS: dict[str, type[ServedBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
    "/v1/embeddings": EmbeddingBody,
}


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line is wrong, in the form of OpenAI's batch errors. `line`: its number from 1 on; None: the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def document(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True)
class LineTask:
    """One line to run: its number from 1 on, where its body lies in the file, in bytes, and the body's priority."""

    line: int
    offset: int
    length: int
    priority: int


class _BatchLine(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _NamedLine(msgspec.Struct, frozen=True):
    custom_id: str


_decoder, _name_decoder = msgspec.json.Decoder(_BatchLine), msgspec.json.Decoder(_NamedLine)


def split_lines(chunks: Iterable[bytes], limit: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield number (from 1 on), offset and bytes of each line that is not blank, without its line break.

    `limit`: bytes of a line; of a longer one only the first `limit` + 1 bytes are yielded.
    """
    number, begin, held, size = 1, 0, bytearray(), 0
    for chunk in chunks:
        at = 0
        while True:
            end = chunk.find(b"\n", at)
            piece = chunk[at : end if end >= 0 else len(chunk)]
            held += piece[: max(0, limit + 1 - len(held))]
            size += len(piece)
            if end < 0:
                break
            if held.strip():
                yield number, begin, bytes(held)
            number, begin, at = number + 1, begin + size + 1, end + 1
            held.clear()
            size = 0
    if held.strip():
        yield number, begin, bytes(held)


def custom_id_of(line: bytes) -> str:
    """Return the `custom_id` of a checked line."""
    return _name_decoder.decode(line).custom_id


class LineCheck:
    """Check the lines of one file.

    Args:
        endpoint: The route of every line, one of `ENDPOINTS`.
        limit: Bytes of a body.
        lines: Lines of the file.
        check_body: Raises RequestError for a body that this server cannot run: its model is not served.
    """

    def __init__(self, endpoint: str, limit: int, lines: int, check_body: Callable[[ServedBody], object]) -> None:
        self._endpoint = endpoint
        self._limit = limit
        self._most = lines
        self._check_body = check_body
        self._seen: set[bytes] = set()
        self._columns = array("q")
        self.errors: list[LineError] = []

    def __len__(self) -> int:
        return len(self._columns) // 4

    @property
    def full(self) -> bool:
        """Whether further lines need not be checked: the file is refused anyway."""
        return len(self.errors) >= MOST_ERRORS

    def add(self, number: int, offset: int, line: bytes) -> None:
        """Check one line; `offset` is where it begins in the file."""
        try:
            found = self._decoded(line)
            raw = bytes(found.body)
            # An equal text before the body is as good: a range is read for its bytes.
            self._columns.extend((number, offset + line.find(raw), len(raw), self._checked(found, raw)))
            if len(self) > self._most:
                raise RequestError(f"a batch has at most {self._most} lines", code="too_many_lines")
        except RequestError as error:
            if not self.full:
                self.errors.append(LineError(error.code or "invalid_request", str(error), number, error.param))

    def result(self) -> list[LineError]:
        """Return the errors of the file; none if it can run."""
        if not len(self) and not self.errors:
            return [LineError("empty_file", "the file has no lines")]
        return self.errors

    def tasks(self) -> Iterator[LineTask]:
        """Yield the lines of a file without errors, in order."""
        columns = self._columns
        for at in range(0, len(columns), 4):
            yield LineTask(*columns[at : at + 4])

    def _decoded(self, line: bytes) -> _BatchLine:
        if len(line) > self._limit:
            raise RequestError(f"the line is longer than {self._limit} bytes", code="line_too_long")
        try:
            return _decoder.decode(line)
        except msgspec.ValidationError as error:
            raise RequestError(f"the line is no request: {error}", code="invalid_request") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the line is no JSON: {error}", code="invalid_json_line") from None

    def _checked(self, found: _BatchLine, raw: bytes) -> int:
        """Return the priority of a line. Raises RequestError."""
        if not 0 < len(found.custom_id) <= MOST_CUSTOM_ID:
            raise RequestError(f"custom_id has 1 to {MOST_CUSTOM_ID} characters", param="custom_id")
        name = blake3(found.custom_id.encode("utf-8", "surrogatepass")).digest(length=16)
        if name in self._seen:
            raise RequestError("another line has this custom_id", param="custom_id", code="duplicate_custom_id")
        self._seen.add(name)
        if found.method != "POST":
            raise RequestError("method must be POST", param="method", code="invalid_method")
        if found.url != self._endpoint:
            raise RequestError(f"url must be the batch's endpoint {self._endpoint}", param="url", code="mismatched_url")
        body = parse(ENDPOINTS[self._endpoint], raw)
        if isinstance(body, ResponseBody):
            for field in ("store", "previous_response_id", "background"):
                if getattr(body, field) not in (None, False):
                    raise unsupported(f"body.{field}", "lines are not kept")
        if isinstance(body, GeneratingBody) and body.stream:
            raise RequestError("a line of a batch is not streamed", param="body.stream", code="unsupported_parameter")
        self._check_body(body)
        return body.priority or 0
