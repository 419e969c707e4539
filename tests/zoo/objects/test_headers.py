"""Safetensors headers: what is made can be parsed, the library reads and writes the same, all else is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from zoo.errors import MalformedCheckpoint
from zoo.manifest import DTYPE_BYTES
from zoo.objects.headers import make_header, parse_header, read_header

KEYS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20).filter(
    lambda key: key != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
ENTRIES = st.lists(
    st.tuples(KEYS, st.sampled_from(sorted(DTYPE_BYTES)), SHAPES), max_size=6, unique_by=lambda entry: entry[0]
)
METADATA = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])), max_size=3
)


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=int)) * DTYPE_BYTES[dtype]


@given(ENTRIES, METADATA, st.sampled_from([1, 8, 64]))
def test_what_is_made_is_parsed(
    entries: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str], align: int
) -> None:
    raw = make_header(entries, metadata, align)
    total = sum(nbytes(dtype, shape) for _, dtype, shape in entries)
    header = parse_header(raw, len(raw) + total, "file")
    assert len(raw) % align == 0
    assert header.raw == raw
    assert header.metadata == metadata
    # Empty tensors share an offset, so entries are compared by name.
    found = {entry.key: (entry.dtype, entry.shape) for entry in header.entries}
    assert found == {key: (dtype, shape) for key, dtype, shape in entries}
    assert sum(entry.nbytes for entry in header.entries) == total


@given(ENTRIES.filter(lambda entries: all(dtype != "F8_E8M0" for _, dtype, _ in entries)))
@settings(max_examples=50)
def test_the_library_reads_what_is_made(entries: list[tuple[str, str, tuple[int, ...]]]) -> None:
    data = b"".join(bytes([i + 1]) * nbytes(dtype, shape) for i, (_, dtype, shape) in enumerate(entries))
    found = dict(
        safetensors.deserialize(  # type: ignore[no-untyped-call]
            make_header(entries, {"format": "pt"}, align=64) + data
        )
    )
    assert {key: (info["dtype"], tuple(info["shape"])) for key, info in found.items()} == {
        key: (dtype, shape) for key, dtype, shape in entries
    }
    for i, (key, dtype, shape) in enumerate(entries):
        assert bytes(found[key]["data"]) == bytes([i + 1]) * nbytes(dtype, shape)


ARRAYS: dict[str, Any] = {"a": np.float32, "b": np.float16, "c": np.int64, "d": np.uint8, "e": np.bool_}


@given(st.dictionaries(st.sampled_from(sorted(ARRAYS)), SHAPES, min_size=1), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_files_of_the_library_are_parsed(tmp_path: Path, shapes: dict[str, tuple[int, ...]], described: bool) -> None:
    arrays = {
        key: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(ARRAYS[key]) for key, shape in shapes.items()
    }
    path = tmp_path / "file.safetensors"
    save_file(arrays, path, metadata={"format": "pt", "other": "x"} if described else None)
    header = read_header(path)
    whole = path.read_bytes()
    assert header.raw + b"".join(whole[entry.begin : entry.end] for entry in header.entries) == whole
    assert header.metadata == ({"format": "pt", "other": "x"} if described else {})
    for entry in header.entries:
        assert whole[entry.begin : entry.end] == arrays[entry.key].tobytes()
        assert entry.shape == arrays[entry.key].shape


def tensor(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def text_of(**table: Any) -> bytes:
    return json.dumps(table).encode()


#: Fault -> (the JSON part, bytes that follow it, what the error says).
MALFORMED: dict[str, tuple[bytes, int, str]] = {
    "not JSON": (b"{nonsense}", 0, "not valid JSON"),
    "not an object": (b"[1, 2]", 0, "does not begin"),
    "two objects": (b"{}{}", 0, "not valid JSON"),
    "empty": (b"", 0, "does not begin"),
    "leading space": (b"  " + text_of(a=tensor()), 4, "does not begin"),
    "trailing tab": (text_of(a=tensor()) + b"\t", 4, "padded with spaces"),
    "not UTF-8": (b'{"\xff": 1}', 0, "not valid JSON"),
    "deeply nested": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, "not valid JSON"),
    "NaN": (b'{"a": NaN}', 0, "NaN"),
    "key twice": (b'{"a":%s,"a":%s}' % (text_of(**tensor()), text_of(**tensor())), 4, "'a' twice"),
    "field twice": (b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4, "'dtype' twice"),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{}}', 0, "twice"),
    "metadata of numbers": (text_of(__metadata__={"a": 1}), 0, "__metadata__"),
    "metadata no table": (text_of(__metadata__="a"), 0, "__metadata__"),
    "NUL in a name": (text_of(**{"a\0b": tensor()}), 4, "control character"),
    "new line in a name": (text_of(**{"a\nb": tensor()}), 4, "control character"),
    "lone surrogate": (b'{"\\ud800": %s}' % text_of(**tensor()), 4, "control character"),
    "empty name": (text_of(**{"": tensor()}), 4, "name is empty"),
    "long name": (text_of(**{"a" * 5000: tensor()}), 4, "longer than"),
    "no table": (text_of(a=[1]), 0, "exactly dtype, shape and data_offsets"),
    "field missing": (text_of(a={"dtype": "U8", "shape": [4]}), 4, "exactly"),
    "field too many": (text_of(a={**tensor(), "stride": [1]}), 4, "exactly"),
    "unknown dtype": (text_of(a=tensor("F3")), 4, "unknown dtype 'F3'"),
    "dtype no text": (text_of(a=tensor(3)), 4, "wrong dtype"),
    "shape no list": (text_of(a=tensor(shape=4)), 4, "wrong dtype, shape"),
    "negative extent": (text_of(a=tensor(shape=[-4])), 4, "wrong dtype, shape"),
    "boolean extent": (text_of(a=tensor(shape=[True, 4])), 4, "wrong dtype, shape"),
    "fraction": (text_of(a=tensor(shape=[4.0])), 4, "wrong dtype, shape"),
    "huge extent": (text_of(a=tensor(shape=[2**70])), 4, "impossible shape"),
    "huge product": (text_of(a=tensor(shape=[2**31, 2**31])), 4, "impossible shape"),
    "huge beside zero": (text_of(a=tensor(shape=[0, 2**40, 2**40], offsets=[0, 0])), 0, "impossible shape"),
    "many dimensions": (text_of(a=tensor(shape=[1] * 100, offsets=[0, 1])), 1, "dimensions"),
    "three offsets": (text_of(a=tensor(offsets=[0, 2, 4])), 4, "data_offsets"),
    "offsets and shape disagree": (text_of(a=tensor(offsets=[0, 5])), 5, "takes 4 bytes by dtype and shape, 5"),
    "offsets backwards": (text_of(a=tensor(offsets=[4, 0])), 4, "takes 4 bytes"),
    "overlap": (text_of(a=tensor(), b=tensor(offsets=[2, 6])), 6, "'b' overlaps"),
    "same bytes": (text_of(a=tensor(), b=tensor()), 4, "overlaps"),
    "hole": (text_of(a=tensor(), b=tensor(offsets=[6, 10])), 10, "'b' leaves a hole"),
    "hole at the front": (text_of(a=tensor(offsets=[2, 6])), 6, "leaves a hole"),
    "trailing bytes": (text_of(a=tensor()), 5, "trailing bytes"),
    "data cut off": (text_of(a=tensor()), 3, "is truncated"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_headers_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    text, data, message = MALFORMED[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * data)
    with pytest.raises(MalformedCheckpoint) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lengths_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    for content, message in [
        (b"", "truncated"),
        (b"\1\0\0", "truncated"),
        (struct.pack("<Q", 50) + b"{}", "does not fit"),
        (struct.pack("<Q", 2**63) + b"{}", "more than"),
        (struct.pack("<Q", 100_000_001) + b"{}", "more than"),
    ]:
        path.write_bytes(content)
        with pytest.raises(MalformedCheckpoint, match=message):
            read_header(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    for path, message in [(tmp_path, "not a regular file"), (tmp_path / "none", "cannot be read")]:
        with pytest.raises(MalformedCheckpoint, match=message):
            read_header(path)


@given(st.data())
@settings(max_examples=200)
def test_any_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    """A flipped byte in a header gives MalformedCheckpoint or a header that covers the file."""
    raw = bytearray(make_header([("a", "F32", (2, 3)), ("b", "U8", (5,))], {"k": "v"}))
    at = data.draw(st.integers(8, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    try:
        header = parse_header(bytes(raw), len(raw) + 29, "file")
    except MalformedCheckpoint:
        return
    assert sum(entry.nbytes for entry in header.entries) == 29


def test_making_refuses_what_parsing_refuses() -> None:
    for entries in [
        [("a", "U8", (1,)), ("a", "U8", (1,))],
        [("a\0", "U8", (1,))],
        [("__metadata__", "U8", (1,))],
        [("a", "X", (1,))],
        [("a", "U8", (-1,))],
    ]:
        with pytest.raises(MalformedCheckpoint):
            make_header(entries)
