"""Tensors by content (BL-12): one read-only safetensors file per tensor, named by BLAKE3 over (dtype, shape, bytes).

The digest is never taken over a file, since a safetensors file with several metadata keys differs from save to save. An
object's file holds one tensor, `tensor`, behind a header that follows from dtype and shape alone, so every byte of the
file is checked.

Memory: a tensor of up to BUFFER_BYTES is held in one buffer, hashed and written from there. A larger one is read twice
in chunks: first to hash it and, only if the store lacks it, again to write it. If the bytes differ the second time, the
put fails.

A put verifies an existing object of the same digest and replaces it if it is damaged, so ingesting a model again
repairs what `verify` found.

An object may be packed instead (`zoo.packed`): another, smaller file then represents it under the same digest. Readers
look for the plain file first, then for the packed one; as either may replace the other at any time, they look more than
once.

Callers hold the store's shared lock from before a put until the catalogue references the object. This module does not
depend on that lock, models, the catalogue or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar

from zoo.errors import DamagedObject, MalformedCheckpoint, MissingObject
from zoo.manifest import TensorMeta
from zoo.objects.headers import ALIGNMENT, object_header, read_header
from zoo.objects.publish import ObjectShelf, Stamp, discard, stamp_of
from zoo.objects.sources import CHUNK_BYTES, ByteSource, again, batches, hasher_of, measured
from zoo.packed.reader import Decoded, PackedStore

__all__ = ["ALIGNMENT", "BUFFER_BYTES", "ByteSource", "Decoded", "ObjectStore", "OpenedTensor", "Put"]

#: Largest tensor, in bytes, that is held in memory whole; each worker of `put_many` may hold one.
BUFFER_BYTES = 8 << 20
#: Concurrent fsyncs share journal commits: with 8 writers a disk takes 3 to 10 times what a single writer gets.
WORKERS = 8

#: Times that a reader looks for an object that is neither plain nor packed: it may change form between two looks.
_LOOKS = 3

_Plain = TypeVar("_Plain")
_Packed = TypeVar("_Packed")


@dataclass(frozen=True, slots=True)
class Put:
    """Result of a put. `new`: the store did not have the tensor."""

    tensor: TensorMeta
    new: bool


@dataclass(frozen=True, slots=True)
class OpenedTensor:
    """A verified plain object: its data runs from byte `offset` of `path`, a multiple of ALIGNMENT, to the end."""

    tensor: TensorMeta
    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class _Staged:
    """A hashed tensor and its temporary file; `path` is None if the store has the object already."""

    tensor: TensorMeta
    path: Path | None


@dataclass(frozen=True, slots=True)
class _Verified:
    stamp: Stamp
    opened: OpenedTensor


class ObjectStore:
    """Objects under `root`, packed ones under `packed` (a sibling folder when None).

    Safe for any number of threads and processes.
    """

    def __init__(self, root: Path, packed: Path | None = None) -> None:
        self.shelf = ObjectShelf(root)
        self.packed = PackedStore(packed or root.with_name("packed"), self.shelf)
        self._verified: dict[str, _Verified] = {}

    def put(self, source: ByteSource) -> Put:
        """Store one tensor, durable on return. Raises StoreFull, StoreError, MalformedCheckpoint as `put_many` does."""
        return next(iter(self.put_many([source])))

    def put_many(self, sources: Iterable[ByteSource]) -> Iterator[Put]:
        """Store tensors, in order; each is durable, name included, when its Put is yielded.

        `sources` is read one batch ahead. Peak memory is WORKERS x BUFFER_BYTES for any number and size of tensors.

        Raises:
            MalformedCheckpoint: A source gave more, fewer or other bytes than it declared.
            StoreFull, StoreError: The store cannot be written. On any error the running batch leaves only whole
                objects.
        """
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="zoo-put") as pool:
            for batch in batches(sources):
                yield from self._put_batch(batch, pool)

    def open(self, digest: str) -> OpenedTensor | Decoded:
        """Return a plain object's location, or a packed object's bytes. Raises DamagedObject.

        A plain object is verified on first use in this process and again when its file has changed; a packed one on
        every call.
        """
        return self._found(digest, self._open_plain, self.packed.load)

    def read(self, digest: str, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield the tensor's bytes in chunks, verified on the way.

        DamagedObject is raised after the last chunk at the latest.
        """
        yield from self._found(
            digest, lambda wanted: self._read_plain(wanted, size), lambda wanted: self.packed.read(wanted, size)
        )

    def has(self, digest: str) -> bool:
        """Return whether the object is present, without reading its bytes."""
        return self.path(digest).is_file() or self.packed.shelf.path(digest).is_file()

    def check(self, digest: str) -> bool:
        """Return whether the object is present and undamaged. Reads all of it on every call."""
        self._verified.pop(digest, None)
        self.packed.clear_verified(digest)
        return self._intact(digest)

    def digests(self) -> Iterator[str]:
        """Yield the digests of all objects, plain or packed, sorted."""
        yield from sorted({*self.shelf.digests(), *self.packed.shelf.digests()})

    def is_empty(self) -> bool:
        """Return whether there is no object, plain or packed. Lists no more than it must."""
        return next(self.shelf.digests(), None) is None and next(self.packed.shelf.digests(), None) is None

    def size(self, digest: str) -> int:
        """Return the bytes of its files on disk, 0 if there are none."""
        return self.shelf.size(digest) + self.packed.shelf.size(digest)

    def path(self, digest: str) -> Path:
        """Return the path of the plain object, present or not. Raises StoreError if the digest is not valid."""
        return self.shelf.path(digest)

    def _put_batch(self, batch: Sequence[ByteSource], pool: ThreadPoolExecutor) -> list[Put]:
        """Stage all sources in parallel, name them in order, then make the names durable with one fsync per folder."""
        staged = [pool.submit(self._stage, source) for source in batch]
        published: set[str] = set()
        try:
            wait(staged)
            puts = [self._publish(future.result(), published) for future in staged]
        finally:
            _discard_all(staged)
        # Objects without a plain file were found packed, and are durable already.
        self.shelf.settle({put.tensor.digest for put in puts if self.shelf.size(put.tensor.digest)}, pool)
        return puts

    def _stage(self, source: ByteSource) -> _Staged:
        header = object_header(source.dtype, source.shape)
        if source.nbytes != TensorMeta("", source.dtype, source.shape).nbytes:
            raise MalformedCheckpoint(
                f"a {source.dtype} tensor of shape {list(source.shape)} does not take {source.nbytes} bytes"
            )
        if source.nbytes > BUFFER_BYTES:
            return self._stage_large(source, header)
        # bytes() copies: the source may reuse a view's memory for the next chunk.
        data = b"".join(bytes(chunk) for chunk in measured(source, BUFFER_BYTES))
        hasher = hasher_of(source.dtype, source.shape)
        hasher.update(data)
        tensor = TensorMeta(hasher.hexdigest(), source.dtype, source.shape)
        return _Staged(tensor, None if self._intact(tensor.digest) else self.shelf.stage([header, data]))

    def _stage_large(self, source: ByteSource, header: bytes) -> _Staged:
        hasher = hasher_of(source.dtype, source.shape)
        for chunk in measured(source):
            hasher.update(chunk)
        tensor = TensorMeta(hasher.hexdigest(), source.dtype, source.shape)
        if self._intact(tensor.digest):
            return _Staged(tensor, None)
        return _Staged(tensor, self.shelf.stage(again(source, header, tensor)))

    def _publish(self, staged: _Staged, published: set[str]) -> Put:
        """Name a staged object, unless an equal tensor of the same batch was named before it."""
        digest = staged.tensor.digest
        if staged.path is None or digest in published:
            return Put(staged.tensor, new=False)
        self.shelf.publish(staged.path, digest)
        published.add(digest)
        return Put(staged.tensor, new=True)

    def _intact(self, digest: str) -> bool:
        try:
            self._found(digest, self._open_plain, self.packed.verify)
        except DamagedObject:
            return False
        return True

    def _found(self, digest: str, plain: Callable[[str], _Plain], packed: Callable[[str], _Packed]) -> _Plain | _Packed:
        """Return the result of the first of the two lookups that finds the object."""
        for _ in range(_LOOKS):
            with suppress(MissingObject):
                return plain(digest)
            with suppress(MissingObject):
                return packed(digest)
        raise MissingObject(f"object {digest} is missing from the store")

    def _open_plain(self, digest: str) -> OpenedTensor:
        stamp = self._stamp(digest)
        known = self._verified.get(digest)
        if known is None or known.stamp != stamp:
            for _ in self.read(digest):
                pass
            known = self._verified[digest] = _Verified(stamp, self._locate(digest))
        return known.opened

    def _read_plain(self, digest: str, size: int) -> Iterator[bytes]:
        """Open the file at once, so that a missing one is reported before the first chunk is read."""
        opened = self._locate(digest)
        try:
            file = FileIO(opened.path)
        except OSError as error:
            raise _unreadable(digest, error) from error
        return _chunks(file, opened, size)

    def _stamp(self, digest: str) -> Stamp:
        try:
            return stamp_of(self.path(digest))
        except OSError as error:
            raise _unreadable(digest, error) from error

    def _locate(self, digest: str) -> OpenedTensor:
        """Read the object's header and check that it is exactly the one that a put writes."""
        self._stamp(digest)
        path = self.path(digest)
        try:
            header = read_header(path)
        except MalformedCheckpoint as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise _unreadable(digest, error.__cause__) from error
            raise DamagedObject(f"object {digest} is damaged: {error}") from error
        if len(header.entries) != 1:
            raise DamagedObject(f"object {digest} is damaged: it does not hold one tensor")
        entry = header.entries[0]
        if header.raw != object_header(entry.dtype, entry.shape):
            raise DamagedObject(f"object {digest} is damaged: its header is not the one it was written with")
        return OpenedTensor(TensorMeta(digest, entry.dtype, entry.shape), path, entry.begin)


def _chunks(file: FileIO, opened: OpenedTensor, size: int) -> Iterator[bytes]:
    """Yield the data of an open object, verified on the way."""
    digest = opened.tensor.digest
    hasher = hasher_of(opened.tensor.dtype, opened.tensor.shape)
    try:
        with file:
            file.seek(opened.offset)
            while chunk := file.read(size):
                hasher.update(chunk)
                yield chunk
    except OSError as error:
        raise _unreadable(digest, error) from error
    if hasher.hexdigest() != digest:
        raise DamagedObject(f"object {digest} is damaged: its bytes do not match its digest")


def _discard_all(staged: Sequence[Future[_Staged]]) -> None:
    """Wait for running stages, then remove every temporary file that was not published."""
    for future in staged:
        future.cancel()
    for future in wait(staged).done:
        if not future.cancelled() and future.exception() is None and (path := future.result().path):
            discard(path)


def _unreadable(digest: str, error: OSError) -> DamagedObject:
    if isinstance(error, FileNotFoundError):
        return MissingObject(f"object {digest} is missing from the store")
    return DamagedObject(f"object {digest} cannot be read: {error.strerror or error}")
