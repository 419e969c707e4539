"""Pack one object: read it with its base, code it chunk by chunk in threads, and write it in one pass.

Both are hashed on the way: a damaged object, or one with a damaged base, is not packed. Memory: a few chunks per
thread. This module removes nothing and does not depend on models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import DamagedObject, InputError, MissingObject
from zoo.manifest import DTYPE_BYTES, TensorMeta
from zoo.objects.headers import object_header
from zoo.objects.publish import ObjectShelf
from zoo.objects.sources import hasher_of
from zoo.packed.layout import CHUNK_BYTES, MAGIC, PackedTable, Unreadable, make_table
from zoo.packed.reader import exactly, in_order

LEVELS = range(-7, 20)


@dataclass(frozen=True, slots=True)
class PackCandidate:
    """A tensor to pack and its base: the digest of a tensor of the same dtype and shape, or None."""

    tensor: TensorMeta
    base: str | None


@dataclass(frozen=True, slots=True)
class Coding:
    """How to pack. Raises InputError for values out of range.

    Fields:
        level: zstd's level, one of LEVELS.
        delta: "difference" or "xor" (`zoo.packed.planes`).
        threads: Threads per object.
    """

    level: int = 1
    delta: str = "difference"
    threads: int = 2

    def __post_init__(self) -> None:
        if self.level not in LEVELS or self.delta not in ("difference", "xor") or self.threads < 1:
            raise InputError(f"there is no packing at level {self.level}, by {self.delta!r}, in {self.threads} threads")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of the object and of its base, and its coded planes."""

    plain: bytes
    base: bytes | None
    planes: list[bytes]


def packed_bytes(plain: ObjectShelf, candidate: PackCandidate, coding: Coding) -> Iterator[bytes]:
    """Yield the packed file of a plain object in parts; no part may be used before the generator has finished.

    Raises:
        MissingObject: The object or its base is not plain, or absent.
        DamagedObject: The object's bytes, or its base's, do not match their digest.
    """
    tensor, base = candidate.tensor, candidate.base
    with ExitStack() as stack:
        mine = stack.enter_context(_plain_object(plain, tensor.digest, tensor))
        theirs = None if base is None else stack.enter_context(_plain_object(plain, base, tensor))
        yield MAGIC
        sizes = []
        hashers = [hasher_of(tensor.dtype, tensor.shape) for _ in range(2)]
        for chunk in _coded(tensor, mine, theirs, coding):
            for hasher, data in zip(hashers, (chunk.plain, chunk.base), strict=True):
                hasher.update(data or b"")
            sizes.append(tuple(map(len, chunk.planes)))
            yield from chunk.planes
    for hasher, digest in zip(hashers, (tensor.digest, base), strict=True):
        if digest is not None and hasher.hexdigest() != digest:
            raise DamagedObject(f"object {digest} is damaged: its bytes do not match its digest")
    yield make_table(PackedTable(tensor, base, "none" if base is None else coding.delta, CHUNK_BYTES, tuple(sizes)))


def _coded(tensor: TensorMeta, mine: int, theirs: int | None, coding: Coding) -> Iterator[_Chunk]:
    from zoo.packed import planes

    start = len(object_header(tensor.dtype, tensor.shape))
    width = DTYPE_BYTES[tensor.dtype]

    def coded(index: int) -> _Chunk:
        begin = index * CHUNK_BYTES
        size = min(CHUNK_BYTES, tensor.nbytes - begin)
        try:
            plain = exactly(mine, size, start + begin)
            base = None if theirs is None else exactly(theirs, size, start + begin)
        except (OSError, Unreadable) as error:
            raise DamagedObject(f"object {tensor.digest} or its base cannot be read: {error}") from error
        return _Chunk(plain, base, planes.encode(plain, base, width, coding.delta, coding.level))

    return in_order(coded, -(-tensor.nbytes // CHUNK_BYTES), coding.threads)


@contextmanager
def _plain_object(shelf: ObjectShelf, digest: str, like: TensorMeta) -> Iterator[int]:
    """Open a plain object and check that its header is that of a tensor of this dtype and shape."""
    path: Path = shelf.path(digest)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise MissingObject(f"object {digest} is missing from the store, or packed") from error
    except OSError as error:
        raise DamagedObject(f"object {digest} cannot be read: {error.strerror or error}") from error
    try:
        header = object_header(like.dtype, like.shape)
        if os.fstat(descriptor).st_size != len(header) + like.nbytes or os.pread(descriptor, len(header), 0) != header:
            raise DamagedObject(f"object {digest} is damaged: its header is not the one it was written with")
        yield descriptor
    finally:
        os.close(descriptor)
