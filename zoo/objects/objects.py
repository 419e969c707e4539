"""Tensors by content: one read-only safetensors file per distinct tensor, named by BLAKE3 over (dtype, shape, bytes)
(BL-12).

The digest is never over a file: a safetensors file with several metadata keys differs from save to save. An object's
own file holds one tensor, `tensor`, behind a header that follows from dtype and shape alone, so every byte of the file
is checked.

Memory: a tensor of up to BUFFER_BYTES is held in one buffer, hashed and written from there. A larger one is read twice
in chunks, first to hash it and, only if the store lacks it, again to write it; a source that gives other bytes the
second time is refused.

A put never trusts what is there already: an object that would stand for the new bytes is verified first and replaced
when it is damaged. So ingesting a model again heals what `verify` found.

An object may be packed instead (`zoo.packed`): then another file stands for it, in fewer bytes, under the same digest.
Readers look for the plain file first, then for the packed one; as either may be put in the other's place at any time,
they look more than once.

Callers hold the store's shared lock from before a put until the catalogue names the object. This file knows nothing of
that lock, of models, the catalogue or torch.
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

#: Largest tensor that is held in memory whole; each worker of `put_many` may hold one.
BUFFER_BYTES = 8 << 20
#: Concurrent fsyncs share journal commits: with 8 writers a disk takes 3 to 10 times what one writer gets.
WORKERS = 8

#: How often a reader looks for an object that is neither plain nor packed: between two looks it may have become the
#: other.
_LOOKS = 3

_Plain = TypeVar("_Plain")
_Packed = TypeVar("_Packed")


@dataclass(frozen=True, slots=True)
class Put:
    """What became of an offered tensor. `new`: the store did not have it."""

    tensor: TensorMeta
    new: bool


@dataclass(frozen=True, slots=True)
class OpenedTensor:
    """A verified plain object: its data begins at byte `offset` of `path`, a multiple of ALIGNMENT, and runs to the
    end.
    """

    tensor: TensorMeta
    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class _Staged:
    """A hashed tensor and its temporary file; no file when the store has the object."""

    tensor: TensorMeta
    path: Path | None


@dataclass(frozen=True, slots=True)
class _Verified:
    stamp: Stamp
    opened: OpenedTensor


class ObjectStore:
    """Objects under `root`, packed ones under `packed` (beside it when None). Safe for any number of threads and
    processes.
    """

    def __init__(self, root: Path, packed: Path | None = None) -> None:
        self.shelf = ObjectShelf(root)
        self.packed = PackedStore(packed or root.with_name("packed"), self.shelf)
        self._verified: dict[str, _Verified] = {}

    def put(self, source: ByteSource) -> Put:
        """Store one tensor, durably on return. Raises StoreFull, StoreError, MalformedCheckpoint as `put_many` does."""
        return next(iter(self.put_many([source])))

    def put_many(self, sources: Iterable[ByteSource]) -> Iterator[Put]:
        """Store tensors, in order. Each is durable, name included, when its Put is yielded; `sources` is read a batch
        ahead.

        Peak memory: WORKERS x BUFFER_BYTES, whatever the number and size of the tensors.

        Raises:
            MalformedCheckpoint: a source whose bytes are more, fewer or other than it said.
            StoreFull, StoreError: the store cannot be written. On any error nothing of the running batch is left but
                whole objects.
        """
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="zoo-put") as pool:
            for batch in batches(sources):
                yield from self._put_batch(batch, pool)

    def open(self, digest: str) -> OpenedTensor | Decoded:
        """A plain object's place, verified on first use in this process and again when its file has changed; a packed
        object's bytes, verified on every call. Raises DamagedObject.
        """
        return self._found(digest, self._open_plain, self.packed.load)

    def read(self, digest: str, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The tensor's bytes in chunks, verified on the way: DamagedObject comes at the latest after the last chunk."""
        yield from self._found(
            digest, lambda wanted: self._read_plain(wanted, size), lambda wanted: self.packed.read(wanted, size)
        )

    def has(self, digest: str) -> bool:
        """Whether the object is there; says nothing of its bytes."""
        return self.path(digest).is_file() or self.packed.shelf.path(digest).is_file()

    def check(self, digest: str) -> bool:
        """Whether the object is there and undamaged: reads all of it, on every call."""
        self._verified.pop(digest, None)
        self.packed.clear_verified(digest)
        return self._intact(digest)

    def digests(self) -> Iterator[str]:
        """Digests of all objects, plain or packed, sorted."""
        yield from sorted({*self.shelf.digests(), *self.packed.shelf.digests()})

    def size(self, digest: str) -> int:
        """Bytes of its files on disk, 0 when there are none."""
        return self.shelf.size(digest) + self.packed.shelf.size(digest)

    def path(self, digest: str) -> Path:
        """Where the plain object is or would be. Raises StoreError when the digest is none."""
        return self.shelf.path(digest)

    def _put_batch(self, batch: Sequence[ByteSource], pool: ThreadPoolExecutor) -> list[Put]:
        """Stage all at once, name them in order, then make the names durable, once per folder."""
        staged = [pool.submit(self._stage, source) for source in batch]
        published: set[str] = set()
        try:
            wait(staged)
            puts = [self._publish(future.result(), published) for future in staged]
        finally:
            _discard_all(staged)
        # Those that are not plain were found packed, and are durable since then.
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
        # bytes(): the source may use a view's memory again for the next chunk.
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
        """Name a staged object, unless an equal tensor of its batch came before it."""
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
        """The object by whichever of the two finds it."""
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
        """Opens the file at once, so that a missing one is known before the first chunk is asked for."""
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
        """Read the object's header, which must be the very one that a put writes."""
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
    """The data of an open object, verified on the way."""
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
    """Wait for what still runs, then remove every temporary file that was not given a name."""
    for future in staged:
        future.cancel()
    for future in wait(staged).done:
        if not future.cancelled() and future.exception() is None and (path := future.result().path):
            discard(path)


def _unreadable(digest: str, error: OSError) -> DamagedObject:
    if isinstance(error, FileNotFoundError):
        return MissingObject(f"object {digest} is missing from the store")
    return DamagedObject(f"object {digest} cannot be read: {error.strerror or error}")
