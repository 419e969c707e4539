"""GGUF headers, read strictly: every count, length, shape and offset is checked before anything is allocated for it.

    magic "GGUF", version, number of tensors, number of metadata values
    metadata     key, type, value                        (arrays: element type, count, elements; never nested)
    tensor table name, dimensions, block type, offset
    padding to the alignment, then the tensors in the table's order, each padded to the alignment

The `gguf` package trusts these numbers; a server that did lost control of its memory (CVE-2026-7482). An accepted
header is kept verbatim: `GgufHeader.raw` followed by the tensors' bytes is the file. Tensors are not read here.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from surgery.sources.gguf.types import ARRAY, BLOCK_TYPES, BOOL, NUMBERS, STRING, BlockType
from zoo.errors import MalformedCheckpoint

MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: Bound on metadata and tensor table together. A vocabulary of 256,000 tokens with its merges takes 12 MB.
MAX_HEADER_BYTES = 32 << 20
MAX_VALUES = 1 << 16
MAX_TENSORS = 1 << 16
#: Bound on the elements of one array. The largest vocabularies have 440,000 merges.
MAX_ITEMS = 1 << 19
MAX_KEY_BYTES = 1024
#: ggml's own limits.
MAX_NAME_BYTES = 64
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
#: Bound on the elements of a tensor: byte offsets stay far below 64-bit overflow.
MAX_ELEMENTS = 1 << 48

_READ_BYTES = 1 << 20
#: Smallest sizes in bytes of one metadata value (empty key, type, one byte) and one row of the tensor table.
_LEAST_VALUE, _LEAST_TENSOR = 13, 33


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of the metadata, still encoded: `data` holds its `count` elements as in the file."""

    kind: int
    count: int
    data: memoryview

    def numbers(self) -> tuple[int | float, ...] | None:
        """Return the elements; None if they are strings."""
        if self.kind == STRING:
            return None
        return struct.unpack(f"<{self.count}{NUMBERS[self.kind]}", self.data)

    def strings(self) -> list[str] | None:
        """Return the elements; None if they are not strings. Raises MalformedCheckpoint if one is not UTF-8."""
        if self.kind != STRING:
            return None
        return list(self._decoded())

    def _decoded(self) -> Iterator[str]:
        at = 0
        for number in range(self.count):
            (length,) = struct.unpack_from("<Q", self.data, at)
            at += 8 + length
            try:
                yield str(self.data[at - length : at], "utf-8")
            except UnicodeDecodeError:
                raise MalformedCheckpoint(f"string {number} of an array in the metadata is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """One tensor of the table.

    Fields:
        shape: As in transformers, the last dimension changing fastest (the file has the reverse).
        begin: Offset of its bytes in the file.
        nbytes: Their number, without padding.
        span: Bytes up to the next tensor, or to the end of the file: its own and the padding.
    """

    name: str
    block: BlockType
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    span: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A parsed header.

    Fields:
        raw: The file's first bytes verbatim, up to the first tensor.
        metadata: Key -> str, int, float, bool or `GgufArray`.
        entries: The tensors, in file order.
    """

    raw: bytes
    metadata: Mapping[str, Any]
    entries: tuple[GgufEntry, ...]


def read_gguf(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file; no tensor is read.

    Raises:
        MalformedCheckpoint: The file is not regular, not GGUF 2 or 3 in little-endian order, truncated, longer than its
            tensors; a count, length, type, shape, alignment or offset is impossible; tensors overlap or leave holes; a
            key or a name occurs twice or is not printable.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise MalformedCheckpoint(f"{path.name} is not a regular file")
        with path.open("rb", buffering=0) as file:
            return _parse(_Cursor(file, status.st_size))
    except _BadGgufError as refused:
        raise MalformedCheckpoint(f"{path.name}: {refused}") from None
    except OSError as error:
        raise MalformedCheckpoint(f"{path.name} cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class _ArrayPlace:
    """Where an array's elements lie in the file: bytes [begin, end)."""

    kind: int
    count: int
    begin: int
    end: int


class _BadGgufError(Exception):
    """The fault of a header; converted to a MalformedCheckpoint that names the file."""


class _Cursor:
    """A position in a file's first bytes, which are read as they are needed and kept."""

    def __init__(self, file: BinaryIO, file_bytes: int) -> None:
        self._file = file
        self._data = bytearray()
        self.file_bytes = file_bytes
        self.at = 0

    @property
    def rest(self) -> int:
        """Bytes that may follow: of the file, and of the largest header."""
        return min(self.file_bytes, MAX_HEADER_BYTES) - self.at

    def skip_bytes(self, count: int, what: str) -> int:
        """Move over `count` bytes, which are then held, and return where they begin."""
        begin = self.at
        if count > self.rest:
            where = "the file" if self.file_bytes <= MAX_HEADER_BYTES else f"{MAX_HEADER_BYTES:,} bytes"
            raise _BadGgufError(f"{what} of {count:,} bytes at byte {begin:,} does not fit in {where}")
        while len(self._data) < begin + count:
            more = self._file.read(max(_READ_BYTES, begin + count - len(self._data)))
            if not more:
                raise _BadGgufError("the file became shorter while it was read")
            self._data += more
        self.at = begin + count
        return begin

    def read_bytes(self, count: int, what: str) -> bytes:
        begin = self.skip_bytes(count, what)
        return bytes(self._data[begin : self.at])

    def skip_strings(self, count: int, what: str) -> None:
        """Move over `count` strings, each its length in 8 bytes and its bytes."""
        for _ in range(count):
            begin = self.skip_bytes(8, what)
            self.skip_bytes(int.from_bytes(self._data[begin : begin + 8], "little"), what)

    def read_number(self, code: str, what: str) -> Any:
        begin = self.skip_bytes(struct.calcsize("<" + code), what)
        return struct.unpack_from("<" + code, self._data, begin)[0]

    def read_text(self, most: int, what: str) -> str:
        """Return a string: its length in 8 bytes, then UTF-8."""
        length = self.read_number("Q", f"the length of {what}")
        if length > most:
            raise _BadGgufError(f"{what} has {length:,} bytes, more than {most:,}")
        try:
            return self.read_bytes(length, what).decode()
        except UnicodeDecodeError:
            raise _BadGgufError(f"{what} is not UTF-8") from None

    def take_all(self) -> bytes:
        """Return the bytes up to this position and drop them."""
        data = bytes(memoryview(self._data)[: self.at])
        self._data = bytearray()
        return data


def _parse(cursor: _Cursor) -> GgufHeader:
    tensors, values = _read_counts(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(values):
        key = _printable(cursor.read_text(MAX_KEY_BYTES, "a key of the metadata"), "a key of the metadata")
        if key in metadata:
            raise _BadGgufError(f"the metadata have {key!r} twice")
        metadata[key] = _read_value(cursor, key)
    alignment = _alignment(metadata)
    table = [_read_entry(cursor) for _ in range(tensors)]
    cursor.skip_bytes(-cursor.at % alignment, "the padding before the tensors")
    entries = tuple(_placed(table, cursor.at, alignment, cursor.file_bytes))
    raw = cursor.take_all()
    return GgufHeader(raw, {key: _over(raw, value) for key, value in metadata.items()}, entries)


def _over(raw: bytes, value: Any) -> Any:
    """Return a value of the metadata; an array becomes a view of the header's bytes."""
    if not isinstance(value, _ArrayPlace):
        return value
    return GgufArray(value.kind, value.count, memoryview(raw)[value.begin : value.end])


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Return the number of tensors and of metadata values."""
    if cursor.file_bytes < 24 or cursor.read_bytes(4, "the magic") != MAGIC:
        raise _BadGgufError("not a GGUF file: it does not begin with 'GGUF' and a header")
    version = cursor.read_number("I", "the version")
    if version not in VERSIONS:
        reason = "in big-endian order" if version and version & 0xFFFF == 0 else f"of GGUF version {version}"
        raise _BadGgufError(f"a file {reason} cannot be read, only little-endian versions 2 and 3")
    tensors, values = cursor.read_number("Q", "the count"), cursor.read_number("Q", "the count")
    if values > min(MAX_VALUES, cursor.rest // _LEAST_VALUE):
        raise _BadGgufError(f"the header promises {values:,} metadata values, more than can follow")
    if tensors > min(MAX_TENSORS, cursor.rest // _LEAST_TENSOR):
        raise _BadGgufError(f"the header promises {tensors:,} tensors, more than can follow")
    if not tensors:
        raise _BadGgufError("the file holds no tensors")
    return tensors, values


def _read_value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.read_number("I", f"the type of {key!r}")
    if kind == STRING:
        return cursor.read_text(MAX_HEADER_BYTES, f"the value of {key!r}")
    if kind == ARRAY:
        return _read_array(cursor, key)
    if kind not in NUMBERS:
        raise _BadGgufError(f"{key!r} has the unknown type {kind}")
    value = cursor.read_number(NUMBERS[kind], f"the value of {key!r}")
    if kind != BOOL:
        return value
    if value > 1:
        raise _BadGgufError(f"{key!r} is a bool of value {value}")
    return bool(value)


def _read_array(cursor: _Cursor, key: str) -> _ArrayPlace:
    kind = cursor.read_number("I", f"the element type of {key!r}")
    count = cursor.read_number("Q", f"the length of {key!r}")
    if kind == ARRAY:
        raise _BadGgufError(f"{key!r} is an array of arrays")
    if kind != STRING and kind not in NUMBERS:
        raise _BadGgufError(f"{key!r} is an array of the unknown type {kind}")
    width = 8 if kind == STRING else struct.calcsize("<" + NUMBERS[kind])
    if count > MAX_ITEMS or count * width > cursor.rest:
        raise _BadGgufError(f"{key!r} promises {count:,} elements, more than can follow")
    begin = cursor.at
    if kind == STRING:
        cursor.skip_strings(count, f"a string of {key!r}")
    else:
        cursor.skip_bytes(count * width, f"the array {key!r}")
    return _ArrayPlace(kind, count, begin, cursor.at)


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise _BadGgufError(f"general.alignment is {str(value)[:40]!r}, not a power of two from 8 to {MAX_ALIGNMENT}")
    return value


@dataclass(frozen=True, slots=True)
class _TableRow:
    """One row of the tensor table: `offset` counts from the end of the header."""

    name: str
    block: BlockType
    shape: tuple[int, ...]
    nbytes: int
    offset: int


def _read_entry(cursor: _Cursor) -> _TableRow:
    name = _printable(cursor.read_text(MAX_NAME_BYTES, "the name of a tensor"), "the name of a tensor")
    dimensions = cursor.read_number("I", f"the dimensions of {name!r}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise _BadGgufError(f"tensor {name!r} has {dimensions:,} dimensions, not 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.read_number("Q", f"the shape of {name!r}") for _ in range(dimensions))
    kind, offset = cursor.read_number("I", f"the type of {name!r}"), cursor.read_number("Q", f"the offset of {name!r}")
    if kind not in BLOCK_TYPES:
        raise _BadGgufError(f"tensor {name!r} has the block type {kind}, which cannot be dequantised")
    return _TableRow(name, BLOCK_TYPES[kind], shape[::-1], _nbytes(name, BLOCK_TYPES[kind], shape), offset)


def _nbytes(name: str, block: BlockType, shape: tuple[int, ...]) -> int:
    """Return a tensor's bytes. `shape` is in the file's order: blocks lie along the first dimension."""
    elements = 1
    for extent in shape:
        elements *= extent
        if not 0 < elements <= MAX_ELEMENTS:
            raise _BadGgufError(f"tensor {name!r} has an impossible shape")
    if shape[0] % block.elements:
        raise _BadGgufError(
            f"tensor {name!r} has rows of {shape[0]:,} elements, which {block.name} cannot hold in blocks"
        )
    return elements // block.elements * block.nbytes


def _placed(table: list[_TableRow], data: int, alignment: int, file_bytes: int) -> Iterator[GgufEntry]:
    """Yield the tensors at their places. They must lie back to back, each padded to the alignment, up to the end."""
    seen: set[str] = set()
    reached = data
    for number, row in enumerate(table):
        if row.name in seen:
            raise _BadGgufError(f"the table has tensor {row.name!r} twice")
        seen.add(row.name)
        if data + row.offset != reached:
            what = "overlaps what lies before it" if data + row.offset < reached else "leaves a hole before it"
            raise _BadGgufError(f"tensor {row.name!r} {what}")
        end = reached + row.nbytes
        padded = end + -end % alignment
        if number == len(table) - 1:  # writers differ in whether they pad the last one
            padded = min(padded, max(file_bytes, end))
        if padded > file_bytes:
            raise _BadGgufError(f"the file is truncated: it ends before tensor {row.name!r} does")
        yield GgufEntry(row.name, row.block, row.shape, reached, row.nbytes, padded - reached)
        reached = padded
    if reached != file_bytes:
        raise _BadGgufError(f"the file has {file_bytes - reached:,} bytes behind its last tensor")


def _printable(text: str, what: str) -> str:
    if not text or any(ord(char) < 32 or 127 <= ord(char) < 160 for char in text):
        raise _BadGgufError(f"{what} is empty or has a control character")
    return text
