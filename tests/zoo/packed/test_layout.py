"""A packed file's table is parsed strictly: no table makes a reader do more than its tensor needs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from zoo.manifest import TensorMeta, canonical_json
from zoo.packed.layout import (
    LENGTH_BYTES,
    MAGIC,
    MAX_CHUNK_BYTES,
    PackedTable,
    Unreadable,
    make_table,
    parse_table,
    table_bytes,
)

DIGEST, BASE = "a" * 64, "b" * 64
TABLE = PackedTable(TensorMeta(DIGEST, "BF16", (5, 100)), BASE, "difference", 400, ((10, 0), (200, 3), (100, 1)))


def size_of(table: PackedTable, text: bytes) -> int:
    return len(MAGIC) + sum(map(sum, table.planes)) + len(text) + LENGTH_BYTES


def test_what_is_written_is_read() -> None:
    for table in (
        TABLE,
        replace(TABLE, base=None, delta="none"),
        PackedTable(TensorMeta(DIGEST, "F32", (0, 3)), BASE, "xor", 400, ()),
    ):
        end = make_table(table)
        size = size_of(table, end[:-LENGTH_BYTES])
        assert table_bytes(end[-LENGTH_BYTES:], size) == len(end) - LENGTH_BYTES
        assert parse_table(end[:-LENGTH_BYTES], DIGEST, size) == table
    assert [TABLE.plain(i) for i in range(3)] == [(0, 400), (400, 800), (800, 1000)]


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"format": 1}, "format 1.*does not know"),
    ({"format": 3}, "does not know"),
    ({"codec": "pickle"}, "does not know"),
    ({"dtype": "F4"}, "dtype"),
    ({"dtype": ["BF16"]}, "dtype"),
    ({"shape": [-5, 100]}, "shape"),
    ({"shape": [True, 500]}, "shape"),
    ({"shape": [1 << 60]}, "shape"),
    ({"shape": [4, 100]}, "chunks are not"),
    ({"base": None}, "base"),
    ({"base": "../" + "b" * 61}, "base"),
    ({"base": DIGEST}, "against itself"),
    ({"delta": "none"}, "base"),
    ({"delta": "eval"}, "base"),
    ({"delta": ["xor"]}, "base"),
    ({"chunk": 0}, "chunks is impossible"),
    ({"chunk": 401}, "chunks is impossible"),
    ({"chunk": 2 * MAX_CHUNK_BYTES}, "chunks is impossible"),
    ({"chunk": 400.0}, "chunks is impossible"),
    ({"planes": [[10, 0], [200, 3]]}, "chunks are not"),
    ({"planes": [[10, 0], [201, 3], [100, 1]]}, "planes of chunk 1"),
    ({"planes": [[10, 0], [200], [100, 1]]}, "planes of chunk 1"),
    ({"planes": [[10, 0], [200, 3], [101, 1]]}, "planes of chunk 2"),
    ({"planes": "x"}, "no table of sizes"),
    ({"planes": [[10, 0], [200, 3], [99, 1]]}, "size is not"),
    ({"extra": 1}, "fields"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[json.dumps(change)[:40] for change, _ in CHANGES])
def test_what_does_not_fit_is_refused(change: dict[str, Any], reason: str) -> None:
    fields = {**json.loads(make_table(TABLE)[:-LENGTH_BYTES]), **change}
    text = canonical_json(fields).encode()
    with pytest.raises(Unreadable, match=reason):
        parse_table(text, DIGEST, size_of(TABLE, text))


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"nan", b"[" * 100_000, b"\xff"])
def test_what_is_no_table_is_refused(text: bytes) -> None:
    with pytest.raises(Unreadable):
        parse_table(text, DIGEST, size_of(TABLE, text))


def test_another_spelling_of_the_same_table_is_refused() -> None:
    text = json.dumps(json.loads(make_table(TABLE)[:-LENGTH_BYTES])).encode()
    with pytest.raises(Unreadable, match="not the one it was written with"):
        parse_table(text, DIGEST, size_of(TABLE, text))


@pytest.mark.parametrize("end", [b"", b"\0" * 7, b"\xff" * 8, (1 << 40).to_bytes(8, "little")])
def test_a_broken_end_is_refused(end: bytes) -> None:
    with pytest.raises(Unreadable):
        table_bytes(end, 10_000)
