"""Objects: equal tensors are one file, bytes come back as stored, damage is found, a full disk leaves no remains."""

from __future__ import annotations

import errno
import os
import stat
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.zoo.factory import Bytes, Constant, files_under, flip_byte, some_bytes
from zoo.errors import DamagedObject, MalformedCheckpoint, StoreError, StoreFull
from zoo.objects import objects as objects_module
from zoo.objects import sources as sources_module
from zoo.objects.objects import ALIGNMENT, BUFFER_BYTES, ObjectStore


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "objects")


def read(objects: ObjectStore, digest: str) -> bytes:
    return b"".join(objects.read(digest, 7))


def test_a_tensor_comes_back_as_it_was(objects: ObjectStore) -> None:
    put = objects.put(Bytes(bytes(range(24)), "F32", (2, 3)))
    opened = objects.open(put.tensor.digest)
    assert put.new
    assert (opened.tensor.dtype, opened.tensor.shape) == ("F32", (2, 3))
    assert opened.tensor == put.tensor
    assert opened.path.read_bytes()[opened.offset :] == bytes(range(24))
    assert opened.offset % ALIGNMENT == 0
    assert read(objects, put.tensor.digest) == bytes(range(24))
    assert stat.S_IMODE(opened.path.stat().st_mode) == 0o444


def test_the_digest_is_of_dtype_shape_and_bytes_and_stays(objects: ObjectStore) -> None:
    """A store outlives versions of this software: this digest must never change."""
    put = objects.put(Bytes(b"\0" * 8, "F32", (2,)))
    assert put.tensor.digest == blake3(b'["F32",[2]]' + b"\0" + b"\0" * 8).hexdigest()
    assert put.tensor.digest.startswith("2746067047fc614b")
    others = [Bytes(b"\0" * 8, "F32", (1, 2)), Bytes(b"\0" * 8, "I32", (2,)), Bytes(b"\0" * 7 + b"\1", "F32", (2,))]
    assert len({objects.put(other).tensor.digest for other in others} | {put.tensor.digest}) == 4


def test_a_stock_reader_reads_an_object(objects: ObjectStore) -> None:
    opened = objects.open(objects.put(Bytes(bytes(range(12)), "U8", (3, 4))).tensor.digest)
    with safe_open(opened.path, "numpy") as file:
        assert file.get_tensor("tensor").tobytes() == bytes(range(12))


@given(st.lists(st.tuples(st.binary(max_size=40), st.sampled_from(["U8", "I8"])), max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
def test_puts_are_in_order_and_new_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, offered: list[tuple[bytes, str]]
) -> None:
    objects = ObjectStore(tmp_path_factory.mktemp("objects"))
    puts = list(objects.put_many(Bytes(data, dtype) for data, dtype in offered))
    assert [(read(objects, put.tensor.digest), put.tensor.dtype) for put in puts] == offered
    assert sum(put.new for put in puts) == len(set(offered)) == len(list(objects.digests()))
    assert not any(put.new for put in objects.put_many(Bytes(data, dtype) for data, dtype in offered))


def test_many_batches(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "BATCH_TENSORS", 3)
    puts = list(objects.put_many(some_bytes(seed % 7) for seed in range(20)))
    assert [put.new for put in puts] == [True] * 7 + [False] * 13
    assert [put.tensor for put in puts[:7]] == [put.tensor for put in puts[7:14]]


def test_sources_are_read_a_batch_ahead_only(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "BATCH_BYTES", 250)
    taken: list[int] = []

    def sources() -> Iterator[Bytes]:
        for seed in range(30):
            taken.append(seed)
            yield some_bytes(seed)

    puts = objects.put_many(sources())
    next(puts)
    assert len(taken) == 3
    puts.close()  # type: ignore[attr-defined]
    assert len(list(objects.digests())) == 3
    assert not list(objects.shelf.temporaries())


def test_large_tensors_are_streamed(objects: ObjectStore) -> None:
    size = 40 * BUFFER_BYTES
    tracemalloc.start()
    try:
        put = objects.put(Constant(size))
        again = objects.put(Constant(size))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert put.new
    assert not again.new
    assert objects.path(put.tensor.digest).stat().st_size == objects.open(put.tensor.digest).offset + size
    assert peak < 2 * BUFFER_BYTES


def test_buffered_and_streamed_tensors_have_the_same_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = some_bytes(1, 5000)
    small = ObjectStore(tmp_path / "a").put(source)
    monkeypatch.setattr(objects_module, "BUFFER_BYTES", 100)
    large = ObjectStore(tmp_path / "b").put(source)
    assert small == large
    assert files_under(tmp_path / "a") == files_under(tmp_path / "b")


@dataclass(frozen=True)
class Reusing(Bytes):
    """A source that reads everything into one small buffer."""

    def chunks(self, size: int) -> Iterator[memoryview]:
        buffer = bytearray(10)
        for begin in range(0, len(self.data), 10):
            buffer[:] = self.data[begin : begin + 10]
            yield memoryview(buffer)


@pytest.mark.parametrize("buffer", [1000, 50])
def test_a_source_may_use_its_buffer_again(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    monkeypatch.setattr(objects_module, "BUFFER_BYTES", buffer)
    data = some_bytes(1, 200).data
    assert read(objects, objects.put(Reusing(data)).tensor.digest) == data


@dataclass(frozen=True)
class Wrong:
    """A source that gives other bytes than declared, or than at the first reading."""

    given: list[bytes]
    nbytes: int = 200
    dtype: str = "U8"
    shape: tuple[int, ...] = (200,)

    def chunks(self, size: int) -> Iterator[bytes]:
        yield self.given.pop(0)


@pytest.mark.parametrize("buffer", [1000, 50])
@pytest.mark.parametrize(("given", "message"), [(b"a" * 199, "fewer"), (b"a" * 201, "more")])
def test_a_source_of_another_length_is_refused(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, buffer: int, given: bytes, message: str
) -> None:
    monkeypatch.setattr(objects_module, "BUFFER_BYTES", buffer)
    with pytest.raises(MalformedCheckpoint, match=message):
        objects.put(Wrong([given, given]))
    assert files_under(objects.shelf.root.parent) == []


def test_a_source_that_changes_between_two_readings_is_refused(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "BUFFER_BYTES", 50)
    with pytest.raises(MalformedCheckpoint, match="changed while it was read"):
        objects.put(Wrong([b"a" * 200, b"b" * 200]))
    assert files_under(objects.shelf.root.parent) == []


def test_bytes_and_shape_must_agree(objects: ObjectStore) -> None:
    with pytest.raises(MalformedCheckpoint, match="does not take 9 bytes"):
        objects.put(Bytes(b"a" * 9, "F32", (2,)))


@pytest.mark.parametrize("at", [0, 12, 30, 100, -1])
def test_any_flipped_byte_is_found(objects: ObjectStore, at: int) -> None:
    """The flipped byte is in the length, the JSON, the padding or the data; the header has 128 bytes, the data 60."""
    digest = objects.put(some_bytes(1, 60)).tensor.digest
    assert objects.open(digest).offset == 128
    flip_byte(objects.path(digest), at)
    assert not objects.check(digest)
    for attempt in (lambda: objects.open(digest), lambda: read(objects, digest)):
        with pytest.raises(DamagedObject, match=digest):
            attempt()


def test_what_is_missing_or_short_is_damaged(objects: ObjectStore) -> None:
    digest = objects.put(some_bytes(1)).tensor.digest
    path = objects.path(digest)
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DamagedObject, match="truncated"):
        objects.open(digest)
    path.unlink()
    assert not objects.has(digest)
    assert not objects.check(digest)
    with pytest.raises(DamagedObject, match="missing"):
        objects.open(digest)


def test_a_swapped_object_is_found(objects: ObjectStore) -> None:
    first, second = (objects.put(some_bytes(seed)).tensor.digest for seed in (1, 2))
    objects.path(first).unlink()
    objects.path(second).rename(objects.path(first))
    with pytest.raises(DamagedObject):
        objects.open(first)


def test_verified_once_but_again_when_the_file_changes(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = objects.put(some_bytes(1)).tensor.digest
    reads: list[str] = []
    real = ObjectStore.read

    def counted(self: ObjectStore, digest: str) -> Iterator[bytes]:
        reads.append(digest)
        return real(self, digest)

    monkeypatch.setattr(ObjectStore, "read", counted)
    objects.open(digest)
    objects.open(digest)
    assert reads == [digest]
    flip_byte(objects.path(digest), -1)
    with pytest.raises(DamagedObject):
        objects.open(digest)


def test_putting_again_heals_damage(objects: ObjectStore) -> None:
    digest = objects.put(some_bytes(1)).tensor.digest
    flip_byte(objects.path(digest), -1)
    assert objects.put(some_bytes(1)).new
    assert objects.check(digest)


@pytest.mark.parametrize("digest", ["", "..", "ab", "A" * 64, "g" * 64, "../" * 21 + "a", "a" * 64 + "\n", "a" * 65])
def test_only_digests_become_paths(objects: ObjectStore, digest: str) -> None:
    for attempt in (objects.path, objects.open, objects.has, objects.check):
        with pytest.raises(StoreError, match="not a digest"):
            attempt(digest)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_leaves_nothing_of_the_batch(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        if data.nbytes > 500:
            raise OSError(code, os.strerror(code))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StoreFull, match="no space left") as caught:
        list(objects.put_many([some_bytes(1), some_bytes(2, 1000), some_bytes(3)]))
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert not list(objects.shelf.temporaries())
    assert all(objects.check(digest) for digest in objects.digests())


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot write"):
        ObjectStore(tmp_path / "file" / "objects").put(some_bytes(1))


def test_a_source_that_cannot_be_read_is_not_the_stores_fault(objects: ObjectStore) -> None:
    @dataclass(frozen=True)
    class Gone(Constant):
        def chunks(self, size: int) -> Iterator[bytes]:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        objects.put(Gone(100))


def test_other_files_are_passed_over(objects: ObjectStore) -> None:
    digest = objects.put(some_bytes(1)).tensor.digest
    (objects.shelf.root / "ab").mkdir(exist_ok=True)
    (objects.shelf.root / "ab" / "README").write_text("x")
    (objects.shelf.root / "ab" / ("cd" + "0" * 62)).write_text("x")
    (objects.shelf.root / "note").write_text("x")
    assert list(objects.digests()) == [digest]
