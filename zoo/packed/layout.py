"""Format of a packed file. Works on bytes only: nothing is read from disk or decoded here.

    magic, 8 bytes | coded planes, chunk by chunk, lowest byte first | table, JSON | length of the table, 8 bytes,
    little-endian

The table is at the end, so that a file is written in one pass. It must be exactly the text that `make_table` writes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zoo.errors import MalformedCheckpoint
from zoo.manifest import DTYPE_BYTES, TensorMeta, canonical_json
from zoo.objects.headers import object_header
from zoo.objects.publish import is_digest

MAGIC = b"zoopack1"
#: Plain bytes per chunk. A chunk is decoded independently: this bounds memory, fits a core's cache, and lets a tensor's
#: chunks be decoded in parallel.
CHUNK_BYTES = 1 << 20
#: Bounds on the sizes in a file, in bytes.
MAX_CHUNK_BYTES = 4 << 20
MAX_TABLE_BYTES = 8 << 20
FORMAT, CODEC = 2, "zstd"
DELTAS = ("difference", "xor", "none")

_LENGTH = struct.Struct("<Q")
#: Bytes at the end of a file that hold the length of the table.
LENGTH_BYTES = _LENGTH.size
_FIELDS = {"format", "codec", "dtype", "shape", "base", "delta", "chunk", "planes"}


class Unreadable(Exception):
    """The fault of a packed file; converted to a DamagedObject that names the object."""


@dataclass(frozen=True, slots=True)
class PackedTable:
    """How a packed tensor is coded.

    Fields:
        base: Digest of a plain object of the same dtype and shape; None if `delta` is "none".
        delta: One of DELTAS.
        chunk: Plain bytes per chunk; the last one may have fewer.
        planes: `planes[i][k]` is the number of bytes of coded plane k of chunk i.
    """

    tensor: TensorMeta
    base: str | None
    delta: str
    chunk: int
    planes: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        return DTYPE_BYTES[self.tensor.dtype]

    def plain(self, index: int) -> tuple[int, int]:
        """Return the range [begin, end) of chunk `index` in the tensor's bytes."""
        return index * self.chunk, min((index + 1) * self.chunk, self.tensor.nbytes)


def make_table(table: PackedTable) -> bytes:
    """Return the end of a packed file: the table and its length."""
    text = canonical_json(
        {
            "format": FORMAT,
            "codec": CODEC,
            "dtype": table.tensor.dtype,
            "shape": list(table.tensor.shape),
            "base": table.base,
            "delta": table.delta,
            "chunk": table.chunk,
            "planes": [list(row) for row in table.planes],
        }
    ).encode()
    return text + _LENGTH.pack(len(text))


def table_bytes(end: bytes, file_bytes: int) -> int:
    """Return the table's length in bytes, from a file's last LENGTH_BYTES bytes. Raises Unreadable."""
    if len(end) != LENGTH_BYTES:
        raise Unreadable("it is truncated")
    length: int = _LENGTH.unpack(end)[0]
    if length > MAX_TABLE_BYTES or len(MAGIC) + length + LENGTH_BYTES > file_bytes:
        raise Unreadable("it is truncated or its end is damaged")
    return length


def parse_table(text: bytes, digest: str, file_bytes: int) -> PackedTable:
    """Parse the table of the packed object `digest` and check it, also against the file's size. Raises Unreadable."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise Unreadable("its table is not JSON") from None
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        raise Unreadable("its table does not have the fields of a packed file")
    if (fields["format"], fields["codec"]) != (FORMAT, CODEC):
        raise Unreadable(
            f"it is of format {fields['format']!r}, codec {fields['codec']!r}, which this software does not know"
        )
    table = PackedTable(
        _tensor(fields, digest), fields["base"], fields["delta"], fields["chunk"], _planes(fields["planes"])
    )
    _check(table)
    if make_table(table)[:-LENGTH_BYTES] != text:
        raise Unreadable("its table is not the one it was written with")
    if len(MAGIC) + sum(map(sum, table.planes)) + len(text) + LENGTH_BYTES != file_bytes:
        raise Unreadable("its size is not the one that its table promises")
    return table


def _tensor(fields: dict[str, Any], digest: str) -> TensorMeta:
    dtype, shape = fields["dtype"], fields["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES or not _is_counts(shape):
        raise Unreadable("its dtype or shape is impossible")
    try:
        object_header(dtype, tuple(shape))
    except MalformedCheckpoint:
        raise Unreadable("its shape is impossible") from None
    return TensorMeta(digest, dtype, tuple(shape))


def _planes(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list) or not all(_is_counts(row) for row in value):
        raise Unreadable("its table of planes is no table of sizes")
    return tuple(map(tuple, value))


def _check(table: PackedTable) -> None:
    based = isinstance(table.base, str) and is_digest(table.base)
    if table.base == table.tensor.digest:
        raise Unreadable("it is packed against itself")
    if table.delta not in DELTAS or (table.delta != "none") != based or (table.base is not None) != based:
        raise Unreadable("its base and the way to use it do not fit")
    if type(table.chunk) is not int or not 0 < table.chunk <= MAX_CHUNK_BYTES or table.chunk % 8:
        raise Unreadable("the size of its chunks is impossible")
    if len(table.planes) != -(-table.tensor.nbytes // table.chunk):
        raise Unreadable("its chunks are not those of its tensor")
    for index, row in enumerate(table.planes):
        begin, end = table.plain(index)
        if len(row) != table.width or max(row) > (end - begin) // table.width:
            raise Unreadable(f"the planes of chunk {index} are impossible")


def _is_counts(value: Sequence[Any]) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
