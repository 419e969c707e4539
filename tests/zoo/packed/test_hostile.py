"""Malicious or incomplete packed files: each gives one clear error on every way of reading, at little memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
import zstandard

from tests.zoo.packed.family import matrix, packed, put_family
from zoo.errors import DamagedObject, MissingObject
from zoo.manifest import TensorMeta
from zoo.objects.publish import discard
from zoo.packed import planes
from zoo.packed.layout import LENGTH_BYTES, MAGIC, PackedTable, make_table
from zoo.packed.pack import pack, unpack
from zoo.store import Store
from zoo.upkeep.audit import audit

COUNT = 12_000  # elements of a matrix, all in one chunk
CHUNK = 1 << 18
BOMB = 1 << 28  # bytes that compress to 8 KiB


def forge(
    store: Store, tensor: TensorMeta, base: str | None, planes: Sequence[bytes], delta: str = "difference"
) -> None:
    """Replace an object with a packed file made by the test."""
    table = PackedTable(tensor, base, delta if base else "none", CHUNK, (tuple(map(len, planes)),))
    replace_packed(store, tensor.digest, MAGIC + b"".join(planes) + make_table(table))


def replace_packed(store: Store, digest: str, data: bytes) -> None:
    discard(store.objects.path(digest))
    store.objects.packed.shelf.publish(store.objects.packed.shelf.stage([data]), digest)


def refused(store: Store, digest: str, reason: str) -> None:
    """Check that every way of reading fails in one line that names the object."""
    for read in (store.open_tensor, lambda wanted: list(store.objects.read(wanted)), store.objects.packed.verify):
        with pytest.raises(DamagedObject, match=reason) as caught:
            read(digest)
        assert digest in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not store.objects.check(digest)
    assert digest in {found.digest for found in audit(store).damaged}


@pytest.fixture
def tensors(store: Store) -> tuple[TensorMeta, TensorMeta]:
    """A tensor of a foundation and its counterpart in a fine-tune."""
    base, tuned = put_family(store)
    return base.tensors[0], tuned.tensors[0]


def frame(size: int, level: int = 1, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=level, **options).compress(bytes(size))


def lying(size: int) -> bytes:
    """Return a frame that declares `size` bytes and holds BOMB bytes."""
    honest, bomb = frame(size), frame(BOMB)
    return honest[: zstandard.frame_header_size(honest)] + bomb[zstandard.frame_header_size(bomb) :]


@pytest.mark.parametrize(
    "plane",
    [
        frame(BOMB),
        lying(COUNT),
        frame(COUNT, write_content_size=False),
        frame(COUNT - 1),
        frame(COUNT)[:-1],
        b"\x28\xb5\x2f\xfd",
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
        bytes(9),
    ],
    ids=["bomb", "lying bomb", "no size", "short", "truncated", "only magic", "skippable", "no frame"],
)
def test_a_plane_that_is_not_its_chunks(store: Store, tensors: tuple[TensorMeta, TensorMeta], plane: bytes) -> None:
    base, mine = tensors
    assert len(plane) < COUNT
    forge(store, mine, base.digest, [b"", plane])
    tracemalloc.start()
    try:
        refused(store, mine.digest, "chunk 0: a plane|chunk 0: .*decoded")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_tensor_that_no_memory_holds(
    store: Store, tensors: tuple[TensorMeta, TensorMeta], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(nbytes: int) -> memoryview:
        raise MemoryError

    _, mine = tensors
    pack(store)
    monkeypatch.setattr(planes, "empty", none)
    with pytest.raises(DamagedObject, match="no memory for 24,000 bytes"):
        store.open_tensor(mine.digest)


def test_another_base(store: Store, tensors: tuple[TensorMeta, TensorMeta]) -> None:
    _, mine = tensors
    with store.catalog.reading() as reader:
        other = reader.model("base").tensors[1]
    larger = store.objects.put(matrix(50, shape=(121, 100))).tensor
    forge(store, mine, other.digest, [b"", b""])
    refused(store, mine.digest, "do not match its digest")
    forge(store, mine, larger.digest, [b"", b""])
    refused(store, mine.digest, f"its base {larger.digest} has another size")
    forge(store, mine, "e" * 64, [b"", b""])
    refused(store, mine.digest, f"its base {'e' * 64} is missing")
    forge(store, mine, mine.digest, [b"", b""])
    refused(store, mine.digest, "against itself")


def test_bases_in_a_circle(store: Store, tensors: tuple[TensorMeta, TensorMeta]) -> None:
    base, mine = tensors
    forge(store, mine, base.digest, [b"", b""])
    forge(store, base, mine.digest, [b"", b""])
    refused(store, mine.digest, f"its base {base.digest} is missing")
    refused(store, base.digest, f"its base {mine.digest} is missing")
    report = unpack(store)
    assert set(report.damaged) == {mine.digest, base.digest}
    put_family(store)
    assert audit(store).damaged == ()


def test_an_object_packed_against_itself_does_not_take_the_plain_one_with_it(
    store: Store, tensors: tuple[TensorMeta, TensorMeta]
) -> None:
    _, mine = tensors
    table = PackedTable(mine, mine.digest, "difference", CHUNK, ((0, 0),))
    data = MAGIC + make_table(table)
    store.objects.packed.shelf.publish(store.objects.packed.shelf.stage([data]), mine.digest)
    pack(store)
    assert audit(store).damaged == ()
    assert mine.digest in packed(store)


def test_cut_short_anywhere(store: Store, tensors: tuple[TensorMeta, TensorMeta]) -> None:
    _, mine = tensors
    pack(store)
    whole = store.objects.packed.shelf.path(mine.digest).read_bytes()
    table = len(make_table(store.objects.packed.table(mine.digest)))
    for size in (0, 1, len(MAGIC), len(MAGIC) + 1, len(whole) - table, len(whole) - LENGTH_BYTES, len(whole) - 1):
        replace_packed(store, mine.digest, whole[:size])
        with pytest.raises(DamagedObject) as caught:
            store.open_tensor(mine.digest)
        assert not isinstance(caught.value, MissingObject)
        replace_packed(store, mine.digest, whole[-size:] if size else b"")
        with pytest.raises(DamagedObject):
            store.open_tensor(mine.digest)
