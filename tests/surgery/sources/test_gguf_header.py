"""GGUF headers are read strictly: whatever is wrong is one clear line, before anything is allocated for it."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest

from benchmarks.surgery.gguf_mutations import ALLOWED_BYTES, read_mutated
from surgery.sources.gguf.header import MAX_HEADER_BYTES, read_gguf
from zoo.errors import MalformedCheckpoint

STRING, ARRAY = 8, 9


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def row(name: str = "t", shape: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(
    values: list[bytes] | None = None,
    rows: list[bytes] | None = None,
    data: bytes = bytes(256),
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    align: int = 32,
) -> bytes:
    """Return a file with one float32 tensor of 256 bytes, or with what is given instead."""
    values, rows = values or [], [row()] if rows is None else rows
    tensors, pairs = counts or (len(rows), len(values))
    head = magic + struct.pack("<IQQ", version, tensors, pairs) + b"".join(values) + b"".join(rows)
    return head + bytes(-len(head) % align) + data


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    values = [
        pair("a.text", STRING, text("é")),
        pair("a.flag", 7, b"\1"),
        pair("a.half", 6, struct.pack("<f", 0.5)),
        pair("a.list", ARRAY, struct.pack("<IQ2h", 3, 2, -1, 5)),
        pair("a.names", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("")),
    ]
    path = tmp_path / "m.gguf"
    rows = [row("a", (32, 3), 2), row("b", (5,), 0, 64)]
    path.write_bytes(file_of(values, rows, bytes(64 + 20)))
    header = read_gguf(path)
    found = dict(header.metadata)
    assert found.pop("a.list").numbers() == (-1, 5)
    assert found.pop("a.names").strings() == ["x", ""]
    assert found == {"a.text": "é", "a.flag": True, "a.half": 0.5}
    assert [(each.name, each.shape, each.nbytes, each.span) for each in header.entries] == [
        ("a", (3, 32), 54, 64),
        ("b", (5,), 20, 20),
    ]
    assert header.raw + path.read_bytes()[header.entries[0].begin :] == path.read_bytes()


CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "magic": (file_of(magic=b"GGML"), "not a GGUF file"),
    "old": (file_of(version=1), "GGUF version 1"),
    "big-endian": (file_of(version=3 << 24), "big-endian"),
    "no tensors": (file_of(rows=[]), "no tensors"),
    "tensors": (file_of(counts=(1 << 60, 0)), "1,152,921,504,606,846,976 tensors, more than can follow"),
    "tensors that would fit": (file_of(counts=(40, 0), data=bytes(1 << 14)), ""),
    "values": (file_of(counts=(1, 1 << 63)), "metadata values, more than can follow"),
    "key": (file_of([struct.pack("<Q", 1 << 40)]), "a key of the metadata has"),
    "empty key": (file_of([pair("", 0, b"\1")]), "empty or has a control character"),
    "key twice": (file_of([pair("a", 0, b"\1"), pair("a", 0, b"\2")]), "the metadata have 'a' twice"),
    "not text": (file_of([pair("a", STRING, text(b"\xff"))]), "is not UTF-8"),
    "type": (file_of([pair("a", 13, b"\1")]), "unknown type 13"),
    "bool": (file_of([pair("a", 7, b"\2")]), "a bool of value 2"),
    "string": (file_of([pair("a", STRING, struct.pack("<Q", 1 << 50))]), "has 1,125,899,906,842,624 bytes"),
    "array": (file_of([pair("a", ARRAY, struct.pack("<IQ", 10, 1 << 61))]), "elements, more than can follow"),
    "string array": (file_of([pair("a", ARRAY, struct.pack("<IQ", STRING, 90_000))]), "elements, more than can follow"),
    "nested": (file_of([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "an array of arrays"),
    "array type": (file_of([pair("a", ARRAY, struct.pack("<IQ", 99, 1))]), "array of the unknown type 99"),
    "alignment": (file_of([pair("general.alignment", 4, struct.pack("<I", 48))]), "not a power of two"),
    "alignment 0": (file_of([pair("general.alignment", 4, bytes(4))]), "not a power of two"),
    "huge alignment": (file_of([pair("general.alignment", 4, struct.pack("<I", 1 << 31))]), "not a power of two"),
    "name": (file_of(rows=[row("n" * 65)]), "the name of a tensor has 65 bytes"),
    "name twice": (file_of(rows=[row(), row(offset=256)], data=bytes(512)), "tensor 't' twice"),
    "no dimensions": (file_of(rows=[row(shape=())]), "0 dimensions"),
    "dimensions": (file_of(rows=[row(shape=(2,) * 5)]), "5 dimensions"),
    "no extent": (file_of(rows=[row(shape=(32, 0))]), "impossible shape"),
    "shape": (file_of(rows=[row(shape=(1 << 62, 4))]), "impossible shape"),
    "product": (file_of(rows=[row(shape=(1 << 32, 1 << 32, 1 << 32, 1 << 32))]), "impossible shape"),
    "block type": (file_of(rows=[row(kind=4)]), "the block type 4"),
    "row of blocks": (file_of(rows=[row(shape=(33, 2), kind=2)]), "rows of 33 elements, which Q4_0 cannot hold"),
    "tensor past the end": (file_of(rows=[row(shape=(32, 1 << 40))]), "truncated"),
    "short": (file_of(data=bytes(255)), "truncated: it ends before tensor 't'"),
    "long": (file_of(data=bytes(257)), "1 bytes behind its last tensor"),
    "overlap": (file_of(rows=[row("a"), row("b", offset=224)], data=bytes(480)), "'b' overlaps"),
    "hole": (file_of(rows=[row("a"), row("b", offset=288)], data=bytes(544)), "'b' leaves a hole"),
    "crooked": (file_of(rows=[row(offset=8)], data=bytes(264)), "leaves a hole"),
    "offset": (file_of(rows=[row(offset=(1 << 64) - 32)]), "leaves a hole"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_file_is_refused_in_one_line_and_little_memory(case: str, tmp_path: Path) -> None:
    data, message = CASES[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedCheckpoint) as raised:
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in str(raised.value)
    assert str(raised.value).isprintable() and str(raised.value).startswith("m.gguf")
    assert peak < 4 << 20


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = file_of([pair("a", STRING, text("x")), pair("b", ARRAY, struct.pack("<IQ", STRING, 1) + text("yz"))])
    path = tmp_path / "m.gguf"
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(MalformedCheckpoint):
            read_gguf(path)


def test_a_header_is_bounded_whatever_the_files_size(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of([pair("a", STRING, struct.pack("<Q", 1 << 35))]))
    with path.open("r+b") as file:
        file.truncate(1 << 36)  # a hole: the file takes no space
    with pytest.raises(MalformedCheckpoint, match=f"more than {MAX_HEADER_BYTES:,}"):
        read_gguf(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedCheckpoint, match="cannot be read"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(MalformedCheckpoint, match="not a regular file"):
        read_gguf(tmp_path)


def test_mutated_files_give_one_clear_line_or_a_valid_read(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    report = read_mutated(400, seed=1, folder=tmp_path)
    assert report.unclear == ()
    assert report.growth_bytes_max < ALLOWED_BYTES
    assert report.refused > 200 and report.read > 5
