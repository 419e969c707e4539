"""Packing changes the files on disk but nothing that is read.

Covered: bytes, reports, plans, collections, repairs, and unpacking.
"""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.zoo.factory import Bytes, Constant, files_under, flip_byte, manifest_of
from tests.zoo.packed.family import contents, matrix, packed, plain, put, put_family
from zoo.errors import DamagedObject, InputError, MissingObject, NotFound, StoreBusy, StoreError, StoreFull
from zoo.manifest import DTYPE_BYTES
from zoo.objects import locks
from zoo.objects.objects import Decoded, OpenedTensor
from zoo.objects.publish import ObjectShelf
from zoo.packed import pack as pack_module
from zoo.packed import planes, reader, writer
from zoo.packed.pack import pack, unpack
from zoo.packed.writer import Coding, PackCandidate, packed_bytes
from zoo.store import Store
from zoo.upkeep.audit import audit
from zoo.upkeep.collect import collect


def remove(store: Store, name: str) -> None:
    with store.catalog.writing() as writer:
        writer.remove_model(name)


def own(store: Store, name: str = "tuned-1") -> list[str]:
    """Return the tensors that a fine-tune does not share with the base."""
    with store.catalog.reading() as reading:
        base = {tensor.digest for tensor in reading.model("base").tensors}
        return [tensor.digest for tensor in reading.model(name).tensors if tensor.digest not in base]


def test_a_fine_tune_takes_less_and_reads_the_same(store: Store) -> None:
    put_family(store, fine_tunes=2)
    before, logical, used = contents(store), files_under(store.root), store.usage()
    report = pack(store)
    assert (report.packed, report.skipped, report.damaged) == (4, 0, ())
    assert report.bytes_after < 0.6 * report.bytes_before
    assert packed(store) == {*own(store), *own(store, "tuned-2")}
    assert not packed(store) & plain(store)
    assert contents(store) == before
    after = store.usage()
    assert used.bytes_stored - after.bytes_stored == report.bytes_before - report.bytes_after
    assert (after.objects, after.bytes_logical) == (used.objects, used.bytes_logical)
    assert after.bytes_stored == sum(
        path.stat().st_size for part in ("objects", "packed") for path in (store.root / part).rglob("??*/*")
    )
    found = audit(store)
    assert found.damaged == ()
    assert found.objects == len(logical)
    assert pack(store) == replace(
        report,
        packed=0,
        skipped=4,
        bytes_before=report.bytes_after,
        bytes_after=report.bytes_after,
        seconds=pytest.approx(0, abs=60),
    )
    undone = unpack(store)
    assert (undone.packed, undone.bytes_before, undone.bytes_after) == (4, report.bytes_after, report.bytes_before)
    assert (packed(store), contents(store), files_under(store.root)) == (set(), before, logical)


@dataclass(frozen=True)
class Pair:
    """A tensor and its counterpart in the base, of one dtype."""

    dtype: str
    shape: tuple[int, ...]

    def sources(self) -> tuple[Bytes, Bytes]:
        draw = np.random.default_rng(5)
        size = int(np.prod(self.shape)) * DTYPE_BYTES[self.dtype]
        base = draw.integers(0, 256, size, dtype=np.uint8)
        mine = base ^ (draw.random(size) < 0.02).astype(np.uint8)
        return Bytes(base.tobytes(), self.dtype, self.shape), Bytes(mine.tobytes(), self.dtype, self.shape)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize("shape", [(67, 301), (20_011,)])
def test_every_dtype_bit_for_bit(store: Store, dtype: str, shape: tuple[int, ...]) -> None:
    base, mine = Pair(dtype, shape).sources()
    put(store, "base", [base])
    (tensor,) = put(store, "tuned", [mine], "full", "base").tensors
    assert pack(store).packed == 1
    assert b"".join(store.objects.read(tensor.digest, 7)) == mine.data
    opened = store.open_tensor(tensor.digest)
    assert isinstance(opened, Decoded)
    assert (opened.tensor, bytes(opened.data)) == (tensor, mine.data)


@pytest.mark.parametrize("delta", ["difference", "xor"])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (7,), (1023,), (1024,), (1025,), (10, 321)])
def test_odd_sizes_in_many_chunks(
    store: Store, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], delta: str
) -> None:
    """Tests the format alone: tensors that packing does not shrink are packed here too."""
    monkeypatch.setattr(writer, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(pack_module, "_pays", lambda packed, plain: True)
    base, mine = Pair("BF16", shape).sources()
    put(store, "base", [base])
    (tensor,) = put(store, "tuned", [mine], "full", "base").tensors
    pack(store, coding=Coding(delta=delta, threads=3))
    if mine.data != base.data:
        assert packed(store) == {tensor.digest}
    assert b"".join(store.objects.read(tensor.digest)) == mine.data
    assert audit(store).damaged == ()


def test_a_dry_run_measures_and_changes_nothing(store: Store) -> None:
    put_family(store)
    before = {
        path: path.stat().st_ino
        for path in store.root.rglob("*")
        if path.is_file() and path.name not in ("pack.lock", "catalog.sqlite")
    }
    measured = pack(store, dry_run=True)
    assert {path: path.stat().st_ino for path in before} == before
    assert packed(store) == set()
    done = pack(store)
    assert replace(done, seconds=0.0) == replace(measured, seconds=0.0)
    measured = unpack(store, dry_run=True)
    assert len(packed(store)) == done.packed
    assert replace(unpack(store), seconds=0.0) == replace(measured, seconds=0.0)


def test_some_models_only(store: Store) -> None:
    put_family(store, fine_tunes=2)
    pack(store, ["d-2"])
    assert packed(store) == set(own(store, "tuned-2"))
    pack(store)
    assert unpack(store, ["tuned-2"]).packed == 2
    assert packed(store) == set(own(store))
    with pytest.raises(NotFound):
        pack(store, ["nothing"])
    with pytest.raises(InputError, match="no full fine-tune"):
        pack(store, ["base"])


@pytest.mark.parametrize("wrong", [{"level": 99}, {"delta": "none"}, {"threads": 0}])
def test_a_coding_that_there_is_not(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="no packing"):
        Coding(**wrong)


def test_what_does_not_pay_or_has_no_counterpart_stays(store: Store) -> None:
    draw = np.random.default_rng(1)
    put(store, "base", [matrix(0), Bytes(draw.bytes(24_000), "BF16", (120, 100)), matrix(2), matrix(3, shape=(4, 4))])
    others = [
        Bytes(draw.bytes(24_000), "BF16", (120, 100)),
        Bytes(draw.bytes(24_000), "F16", (120, 100)),
        matrix(3, 1, shape=(4, 4)),
    ]
    put(store, "tuned", [matrix(0, 1), *others, matrix(9)], "full", "base")
    report = pack(store)
    assert (report.packed, report.skipped) == (1, 4)  # noise, another dtype, too small, a layer that the base lacks


def test_alone(store: Store) -> None:
    put_family(store)
    before = contents(store)
    assert (
        pack(store, alone=True).packed == 3
    )  # two of the fine-tune, and the base tensor that nothing is packed against
    assert {store.objects.packed.table(digest).base is None for digest in packed(store)} == {True, False}
    assert contents(store) == before
    assert audit(store).damaged == ()
    collect(store)
    assert contents(store) == before


def test_bases_stay_plain_whatever_the_order(store: Store) -> None:
    """A fine-tune of a fine-tune is packed against the foundation.

    Where the foundation lacks a counterpart, the parent's tensor is the base and stays plain.
    """
    put(store, "base", [matrix(0)])
    put(store, "tuned", [matrix(0, 1), matrix(5)], "full", "base")
    put(store, "further", [matrix(0, 2), matrix(5, 1)], "full", "tuned")
    put(store, "other", [matrix(5), matrix(0)], "full", "further")  # has the bases of other tensors at other places
    before = contents(store)
    pack(store, ["further"])
    pack(store)
    tables = [store.objects.packed.table(digest) for digest in packed(store)]
    assert len(tables) == 3
    assert {table.base for table in tables} <= plain(store)
    assert contents(store) == before


def test_a_base_lives_as_long_as_what_stands_on_it(store: Store) -> None:
    """Another model uses the packed tensor without naming the tensor it is packed against."""
    put_family(store)
    pack(store)
    tensors = [matrix(0, 1), matrix(1, 1)]
    for digest in packed(store):
        with suppress(OSError):  # a copy of the store need not have empty folders
            store.objects.path(digest).parent.rmdir()
    put(store, "heir", tensors)
    assert packed(store) == set(own(store))  # put again, recognised as packed
    before = {digest: data for digest, data in contents(store).items() if digest in packed(store)}
    remove(store, "tuned-1")
    remove(store, "base")
    collect(store)
    assert {digest: data for digest, data in contents(store).items() if digest in packed(store)} == before
    assert len(plain(store)) == 2  # the two bases that no model names
    assert audit(store).damaged == ()
    assert collect(store).objects_removed == 0
    remove(store, "heir")
    collect(store)
    assert (packed(store), plain(store)) == (set(), set())


def test_an_ingest_that_fails_leaves_bases_alone(store: Store) -> None:
    put_family(store)
    pack(store)
    put(store, "heir", [matrix(0, 1), matrix(1, 1)])
    remove(store, "tuned-1")
    remove(store, "base")
    collect(store)
    lost = next(iter(plain(store)))
    store.objects.path(lost).unlink()
    with pytest.raises(RuntimeError), store.ingesting():
        assert sum(one.new for one in store.objects.put_many([matrix(0), matrix(1), matrix(2)])) == 2
        raise RuntimeError
    assert lost in plain(store)
    assert len(plain(store)) == 2
    assert audit(store).damaged == ()


def test_a_collection_stops_at_a_lost_base_or_an_unreadable_table(store: Store) -> None:
    put_family(store)
    pack(store)
    digest = own(store)[0]
    base = store.objects.packed.table(digest).base
    assert base is not None
    kept = store.objects.path(base).read_bytes()
    store.objects.put(matrix(99))
    with store.catalog.writing() as catalog:  # as if a later version had released a base
        catalog.remove_model("tuned-1")
        catalog.remove_model("base")
        catalog.put_model(
            manifest_of("heir", [store.objects.packed.table(one).tensor for one in sorted(packed(store))])
        )
    for side in ("0", "1"):  # the heir's blobs; without them the collection would stop for another reason
        store.blobs.shelf.publish(store.blobs.shelf.stage([b"x"]), side * 64)
    store.objects.path(base).unlink()
    with pytest.raises(StoreError, match=rf"nothing was removed.*{base}"):
        collect(store)
    store.objects.path(base).write_bytes(kept)
    flip_byte(store.objects.packed.shelf.path(digest), -1)
    with pytest.raises(StoreError, match=r"nothing was removed.*damaged"):
        collect(store)


def test_damage_is_found_and_named(store: Store) -> None:
    put_family(store, fine_tunes=2)
    pack(store)
    mine, base = own(store)[0], store.objects.packed.table(own(store)[0]).base
    assert base is not None
    size = store.objects.packed.shelf.size(mine)
    for at in (0, 9, size // 2, size - 40, size - 1):
        flip_byte(store.objects.packed.shelf.path(mine), at)
        assert [(found.digest, found.models) for found in audit(store).damaged] == [(mine, ("tuned-1",))]
        with pytest.raises(DamagedObject, match="tuned-1"):
            store.open_tensor(mine)
        with pytest.raises(DamagedObject):
            list(store.objects.read(mine))
        flip_byte(store.objects.packed.shelf.path(mine), at)
    assert audit(store).damaged == ()
    flip_byte(store.objects.path(base), -1)
    found = {damaged.digest: damaged.models for damaged in audit(store).damaged}
    assert found.pop(base) == ("base", "tuned-1", "tuned-2")
    assert found.pop(mine) == ("tuned-1",)
    assert list(found.values()) == [("tuned-2",)]
    with pytest.raises(DamagedObject, match=f"its base {base} is damaged.*tuned-1"):
        store.open_tensor(mine)


def test_ingesting_again_heals(store: Store) -> None:
    put_family(store)
    before = contents(store)
    pack(store)
    first, second = own(store)
    base = store.objects.packed.table(second).base
    assert base is not None
    flip_byte(store.objects.packed.shelf.path(first), 20)
    flip_byte(store.objects.path(base), -1)
    put_family(store)
    assert audit(store).damaged == ()
    assert contents(store) == before
    pack(store)
    assert packed(store) == {first, second}
    assert not packed(store) & plain(store)
    assert contents(store) == before


def test_a_healed_fine_tune_lets_go_of_a_damaged_base(store: Store) -> None:
    put_family(store)
    pack(store)
    put(store, "heir", [matrix(0, 1), matrix(1, 1)])
    remove(store, "tuned-1")
    remove(store, "base")
    for digest in plain(store):
        flip_byte(store.objects.path(digest), -1)
    assert {found.models for found in audit(store).damaged if found.digest in plain(store)} >= {("heir",)}
    put(store, "heir", [matrix(0, 1), matrix(1, 1)])
    collect(store)
    assert audit(store).damaged == ()
    assert packed(store) == set()


def test_what_is_damaged_is_not_packed(store: Store) -> None:
    put_family(store)
    first, second = own(store)
    with store.catalog.reading() as reading:
        bases = [tensor.digest for tensor in reading.model("base").tensors]
    flip_byte(store.objects.path(first), -1)
    flip_byte(store.objects.path(bases[1]), -1)
    report = pack(store)
    assert (report.packed, report.damaged) == (0, (first, second))
    assert packed(store) == set()
    assert not list(store.objects.packed.shelf.temporaries())


def test_a_packed_file_that_does_not_come_back_is_thrown_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_family(store)
    before = contents(store)

    def wrong(data: bytes, *rest: object) -> list[bytes]:
        return [b"", b""]

    monkeypatch.setattr(planes, "encode", wrong)
    with pytest.raises(StoreError, match="stays plain"):
        pack(store)
    assert packed(store) == set()
    assert contents(store) == before


def test_a_full_disk_leaves_it_as_it_was(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_family(store)
    before = contents(store)

    def full(self: ObjectShelf, chunks: object) -> None:
        raise StoreFull("no space")

    for change in (pack, unpack):
        with monkeypatch.context() as patched:
            patched.setattr(ObjectShelf, "stage", full)
            with pytest.raises(StoreFull):
                change(store)
        assert contents(store) == before
        pack(store)


def test_one_packer_at_a_time_and_collections_between(store: Store) -> None:
    put_family(store)
    with locks.exclusive(store.root / "pack.lock", 0), pytest.raises(StoreBusy):
        pack(store)
    with store.packing():
        collect(store, timeout=0)
    seen = []
    pack(store, progress=lambda done, total: seen.append((done, total, collect(store, timeout=0).objects_removed)))
    assert [(done, removed) for done, _, removed in seen] == [(24_000, 0), (48_000, 0)]


def test_what_goes_away_while_packing_is_left_out(store: Store) -> None:
    put_family(store, fine_tunes=1)

    def gone(done: int, total: int) -> None:
        if done == 24_000:
            remove(store, "tuned-1")
            remove(store, "base")
            collect(store)

    report = pack(store, progress=gone)
    assert (report.packed, report.skipped, report.damaged) == (1, 1, ())
    assert (packed(store), plain(store)) == (set(), set())


def test_a_reader_that_comes_between_looks_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object is packed, or unpacked, between a reader's look for the plain file and its look for the packed one."""
    put_family(store)
    before = contents(store)
    digest = own(store)[0]
    looks = {"_locate": pack, "load": unpack}
    for owner, name in ((store.objects, "_locate"), (store.objects.packed, "load"), (store.objects, "_locate")):
        first = getattr(owner, name)

        def racing(wanted: str, name: str = name, first: object = first) -> object:
            monkeypatch.undo()
            looks[name](store)
            return first(wanted)  # type: ignore[operator]

        store.objects._verified.clear()
        monkeypatch.setattr(owner, name, racing)
        opened = store.objects.open(digest)
        data = bytes(opened.data) if isinstance(opened, Decoded) else opened.path.read_bytes()[opened.offset :]
        assert data == before[digest]


def test_an_open_reader_reads_to_the_end(store: Store) -> None:
    put_family(store)
    digest = own(store)[0]
    for change in (pack, unpack):
        chunks = store.objects.read(digest, 1000)
        data = next(chunks)
        change(store)
        collect(store)
        assert data + b"".join(chunks) == matrix(0, 1).data


def test_missing_is_missing(store: Store) -> None:
    put_family(store)
    pack(store)
    digest = own(store)[0]
    store.objects.packed.shelf.path(digest).unlink()
    for attempt in (store.objects.open, store.objects.packed.table, store.objects.packed.verify):
        with pytest.raises(MissingObject, match="missing"):
            attempt(digest)
    assert not store.objects.has(digest)
    assert store.objects.has(own(store)[1])
    assert isinstance(store.objects.open(next(iter(plain(store)))), OpenedTensor)


def test_memory_does_not_grow_with_the_tensor(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "WORKERS", 2)
    size = 64 << 20
    with store.ingesting():
        base, mine = (one.tensor for one in store.objects.put_many([Constant(size, 1), Constant(size, 2)]))
    tracemalloc.start()
    try:
        staged = store.objects.packed.shelf.stage(
            packed_bytes(store.objects.shelf, PackCandidate(mine, base.digest), Coding())
        )
        store.objects.packed.shelf.publish(staged, mine.digest)
        store.objects.shelf.remove(mine.digest)
        for _ in store.objects.read(mine.digest):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 2
