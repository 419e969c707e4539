"""Safetensors headers, read strictly and written canonically. Works on bytes only; no tensor is built here.

The `safetensors` library accepts identical duplicate keys, leading white space and control characters in names. Two
readers that disagree about such a file could see different weights, so all of these are refused. An accepted header is
kept verbatim: `Header.raw` followed by the tensors' bytes is the file.

This module does not depend on the store, models or torch.
"""

from __future__ import annotations

import json
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from zoo.errors import MalformedCheckpoint
from zoo.manifest import DTYPE_BYTES

#: The safetensors library's own limit on the header, in bytes.
MAX_HEADER_BYTES = 100_000_000
MAX_NAME_CHARACTERS = 4096
MAX_DIMENSIONS = 64
#: Bound on one extent and on the product of the non-zero ones: far above any tensor, and byte offsets stay far below
#: 64-bit overflow.
MAX_ELEMENTS = 1 << 52

#: Data begins at a multiple of this in an object's file, so that a mapped file can be viewed as any dtype.
ALIGNMENT = 64

_LENGTH = struct.Struct("<Q")
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file. `begin` and `end` are absolute byte offsets in the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header.

    Fields:
        raw: The file's first bytes verbatim (length, JSON, padding).
        entries: The tensors in order of offset.
    """

    raw: bytes
    entries: tuple[HeaderEntry, ...]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file; the tensors' bytes are not read.

    Raises:
        MalformedCheckpoint: The file is not regular, truncated or oversized; the header is not strict JSON, has
            duplicate or unprintable names or an unknown dtype; offsets overlap, leave holes or do not match dtype and
            shape; or the file is longer or shorter than the header says.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise MalformedCheckpoint(f"{path} is not a regular file")
        with path.open("rb") as file:
            first = file.read(_LENGTH.size)
            raw = first + file.read(_json_length(path, first, status.st_size))
    except OSError as error:
        raise MalformedCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_header(raw, status.st_size, str(path))


def parse_header(raw: bytes, file_bytes: int, where: str) -> Header:
    """Check and parse a header in memory. `where` names the file in errors. Raises MalformedCheckpoint."""
    try:
        table = _loads(raw[_LENGTH.size :])
        metadata = _metadata(table.pop("__metadata__", {}))
        entries = tuple(
            sorted((_entry(key, value, len(raw)) for key, value in table.items()), key=lambda e: (e.begin, e.end))
        )
        _check_cover(entries, len(raw), file_bytes)
    except _Refused as refused:
        raise MalformedCheckpoint(f"{where}: {refused}") from None
    return Header(raw, entries, metadata)


def make_header(
    entries: Sequence[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    align: int = 8,
) -> bytes:
    """Return the first bytes of a new file: length, JSON and spaces up to a multiple of `align` bytes.

    Args:
        entries: (key, dtype, shape) in the order in which the tensors' bytes follow.

    Raises:
        MalformedCheckpoint: A duplicate or refused key, an unknown dtype or an impossible shape.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key, dtype, shape in entries:
        begin, end = end, end + _nbytes(key, dtype, shape)
        if key in table:
            raise MalformedCheckpoint(f"tensor {key!r} is named twice")
        table[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % align)
    if len(text) > MAX_HEADER_BYTES:
        raise MalformedCheckpoint(f"the header would take {len(text)} bytes, more than {MAX_HEADER_BYTES}")
    return _LENGTH.pack(len(text)) + text


def object_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the first bytes of an object's file, which holds one tensor named `tensor`.

    Raises MalformedCheckpoint for an impossible dtype or shape.
    """
    return make_header([("tensor", dtype, shape)], align=ALIGNMENT)


class _Refused(Exception):
    """The fault of a header; converted to a MalformedCheckpoint that names the file."""


def _json_length(path: Path, first: bytes, file_bytes: int) -> int:
    if len(first) < _LENGTH.size:
        raise MalformedCheckpoint(f"{path} is truncated: {file_bytes} bytes hold no safetensors header")
    length: int = _LENGTH.unpack(first)[0]
    if length > MAX_HEADER_BYTES:
        raise MalformedCheckpoint(f"{path} promises a header of {length} bytes, more than {MAX_HEADER_BYTES}")
    if _LENGTH.size + length > file_bytes:
        raise MalformedCheckpoint(
            f"{path} is truncated: its header of {length} bytes does not fit in {file_bytes} bytes"
        )
    return length


def _loads(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise _Refused("the header does not begin with '{'")
    try:
        decoded = text.rstrip(b" ").decode("utf-8")
        if not decoded.endswith("}"):
            raise _Refused("the header is not one JSON object padded with spaces")
        table = json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _Refused(f"the header is not valid JSON ({error})") from None
    if not isinstance(table, dict):  # pragma: no cover - it begins with '{'
        raise _Refused("the header is not a JSON object")
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f"the header names {twice!r} twice")
    return table


def _no_constant(name: str) -> NoReturn:
    raise _Refused(f"the header holds {name}")


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise _Refused("__metadata__ is not a table of strings")
    return value


def _entry(key: str, value: Any, data: int) -> HeaderEntry:
    if not isinstance(value, dict) or set(value) != _FIELDS:
        raise _Refused(f"tensor {key!r} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise _Refused(f"tensor {key!r} has a wrong dtype, shape or data_offsets")
    try:
        nbytes = _nbytes(key, dtype, tuple(shape))
    except MalformedCheckpoint as error:
        raise _Refused(str(error)) from None
    if offsets[1] - offsets[0] != nbytes:
        raise _Refused(
            f"tensor {key!r} takes {nbytes} bytes by dtype and shape, {offsets[1] - offsets[0]} by its offsets"
        )
    return HeaderEntry(key, dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _is_counts(value: Any) -> bool:
    """Return whether the value is a list of integers >= 0. (`True` is an int in Python, but not in JSON.)"""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _nbytes(key: str, dtype: str, shape: tuple[int, ...]) -> int:
    _check_name(key)
    if dtype not in DTYPE_BYTES:
        raise MalformedCheckpoint(f"tensor {key!r} has the unknown dtype {dtype!r}")
    if len(shape) > MAX_DIMENSIONS:
        raise MalformedCheckpoint(f"tensor {key!r} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    room = 1
    for extent in shape:
        room *= max(extent, 1)
        if extent < 0 or room > MAX_ELEMENTS:
            raise MalformedCheckpoint(f"tensor {key!r} has an impossible shape")
    return (0 if 0 in shape else room) * DTYPE_BYTES[dtype]


def _check_name(key: str) -> None:
    """Raise MalformedCheckpoint for a name that is empty, reserved, too long or not printable.

    Names end up in manifests, error lines and exported files, so control characters and lone surrogates are refused.
    """
    if not key or len(key) > MAX_NAME_CHARACTERS or key == "__metadata__":
        raise MalformedCheckpoint(f"a tensor's name is empty, reserved or longer than {MAX_NAME_CHARACTERS} characters")
    if any(ord(char) < 32 or 127 <= ord(char) < 160 or 0xD800 <= ord(char) < 0xE000 for char in key):
        raise MalformedCheckpoint(f"tensor {key[:80]!r} has a control character in its name")


def _check_cover(entries: Sequence[HeaderEntry], data: int, file_bytes: int) -> None:
    """Check that the tensors lie back to back from the end of the header to the end of the file."""
    reached = data
    for entry in entries:
        if entry.begin != reached:
            what = "overlaps the tensor before it" if entry.begin < reached else "leaves a hole before it"
            raise _Refused(f"tensor {entry.key!r} {what}")
        reached = entry.end
    if reached != file_bytes:
        what = "is truncated" if reached > file_bytes else "has trailing bytes"
        raise _Refused(f"the file {what}: the header promises {reached} bytes, there are {file_bytes}")
