"""Tensors by content: one read-only safetensors file per distinct tensor, named by BLAKE3 over (dtype, shape, bytes) (BL-12).

The digest is never over a file: a safetensors file with several metadata keys differs from save to save. An object's own file holds
one tensor, `tensor`, behind a header that follows from dtype and shape alone, so every byte of the file is checked.

Memory: a tensor of up to BUFFER_BYTES is held in one buffer, hashed and written from there. A larger one is read twice in chunks,
first to hash it and, only if the store lacks it, again to write it; a source that gives other bytes the second time is refused.

A put never trusts what is there already: an object that would stand for the new bytes is verified first and replaced when it is damaged.
So ingesting a model again heals what `verify` found.

Callers hold the store's shared lock from before a put until the catalogue names the object. This file knows nothing of that lock, of
models, the catalogue or torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import DamagedObject, MalformedCheckpoint
from zoo.headers import make_header, read_header
from zoo.manifest import TensorMeta
from zoo.publish import Shelf, discard
from zoo.sources import CHUNK_BYTES, ByteSource, again, batches, hasher_of, measured

__all__ = ["ALIGNMENT", "BUFFER_BYTES", "ByteSource", "ObjectStore", "Opened", "Put"]

#: Largest tensor that is held in memory whole; each worker of `put_many` may hold one.
BUFFER_BYTES = 8 << 20
#: Data begins at a multiple of this in an object's file: mapped, it can be viewed as any dtype.
ALIGNMENT = 64
#: Concurrent fsyncs share journal commits: with 8 writers a disk takes 3 to 10 times what one writer gets.
WORKERS = 8

_KEY = "tensor"


@dataclass(frozen=True, slots=True)
class Put:
    """What became of an offered tensor. `new`: the store did not have it."""

    tensor: TensorMeta
    new: bool


@dataclass(frozen=True, slots=True)
class Opened:
    """A verified object: its data begins at byte `offset` of `path`, a multiple of ALIGNMENT, and runs to the end."""

    tensor: TensorMeta
    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class _Staged:
    """A hashed tensor and its temporary file; no file when the store has the object."""

    tensor: TensorMeta
    path: Path | None


@dataclass(frozen=True, slots=True)
class _Stamp:
    """Tells one file from a later one under the same name."""

    inode: int
    size: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class _Verified:
    stamp: _Stamp
    opened: Opened


class ObjectStore:
    """Objects under `root`. Safe for any number of threads and processes."""

    def __init__(self, root: Path) -> None:
        self.shelf = Shelf(root)
        self._verified: dict[str, _Verified] = {}

    def put(self, source: ByteSource) -> Put:
        """Store one tensor, durably on return. Raises StoreFull, StoreError, MalformedCheckpoint as `put_many` does."""
        return next(iter(self.put_many([source])))

    def put_many(self, sources: Iterable[ByteSource]) -> Iterator[Put]:
        """Store tensors, in order. Each is durable, name included, when its Put is yielded; `sources` is read a batch ahead.

        Peak memory: WORKERS x BUFFER_BYTES, whatever the number and size of the tensors.

        Raises:
            MalformedCheckpoint: a source whose bytes are more, fewer or other than it said.
            StoreFull, StoreError: the store cannot be written. On any error nothing of the running batch is left but whole objects.
        """
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="zoo-put") as pool:
            for batch in batches(sources):
                yield from self._put_batch(batch, pool)

    def open(self, digest: str) -> Opened:
        """The object's place, verified on first use in this process and again when its file has changed. Raises DamagedObject."""
        stamp = self._stamp(digest)
        known = self._verified.get(digest)
        if known is None or known.stamp != stamp:
            for _ in self.read(digest):
                pass
            known = self._verified[digest] = _Verified(stamp, self._locate(digest))
        return known.opened

    def read(self, digest: str, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The tensor's bytes in chunks, verified on the way: DamagedObject comes at the latest after the last chunk."""
        opened = self._locate(digest)
        hasher = hasher_of(opened.tensor.dtype, opened.tensor.shape)
        try:
            with opened.path.open("rb", buffering=0) as file:
                file.seek(opened.offset)
                while chunk := file.read(size):
                    hasher.update(chunk)
                    yield chunk
        except OSError as error:
            raise _unreadable(digest, error) from error
        if hasher.hexdigest() != digest:
            raise DamagedObject(f"object {digest} is damaged: its bytes do not match its digest")

    def has(self, digest: str) -> bool:
        """Whether the object is there; says nothing of its bytes."""
        return self.path(digest).is_file()

    def check(self, digest: str) -> bool:
        """Whether the object is there and undamaged: reads all of it, on every call."""
        self._verified.pop(digest, None)
        return self._intact(digest)

    def digests(self) -> Iterator[str]:
        return self.shelf.digests()

    def path(self, digest: str) -> Path:
        """Where the object is or would be. Raises StoreError when the digest is none."""
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
        self.shelf.settle({put.tensor.digest for put in puts}, pool)
        return puts

    def _stage(self, source: ByteSource) -> _Staged:
        header = make_header([(_KEY, source.dtype, source.shape)], align=ALIGNMENT)
        if source.nbytes != TensorMeta("", source.dtype, source.shape).nbytes:
            raise MalformedCheckpoint(f"a {source.dtype} tensor of shape {list(source.shape)} does not take {source.nbytes} bytes")
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
            self.open(digest)
        except DamagedObject:
            return False
        return True

    def _stamp(self, digest: str) -> _Stamp:
        try:
            status = self.path(digest).stat()
        except OSError as error:
            raise _unreadable(digest, error) from error
        return _Stamp(status.st_ino, status.st_size, status.st_mtime_ns)

    def _locate(self, digest: str) -> Opened:
        """Read the object's header, which must be the very one that a put writes."""
        self._stamp(digest)
        path = self.path(digest)
        try:
            header = read_header(path)
        except MalformedCheckpoint as error:
            raise DamagedObject(f"object {digest} is damaged: {error}") from error
        if len(header.entries) != 1:
            raise DamagedObject(f"object {digest} is damaged: it does not hold one tensor")
        entry = header.entries[0]
        if header.raw != make_header([(_KEY, entry.dtype, entry.shape)], align=ALIGNMENT):
            raise DamagedObject(f"object {digest} is damaged: its header is not the one it was written with")
        return Opened(TensorMeta(digest, entry.dtype, entry.shape), path, entry.begin)


def _discard_all(staged: Sequence[Future[_Staged]]) -> None:
    """Wait for what still runs, then remove every temporary file that was not given a name."""
    for future in staged:
        future.cancel()
    for future in wait(staged).done:
        if not future.cancelled() and future.exception() is None and (path := future.result().path):
            discard(path)


def _unreadable(digest: str, error: OSError) -> DamagedObject:
    if isinstance(error, FileNotFoundError):
        return DamagedObject(f"object {digest} is missing from the store")
    return DamagedObject(f"object {digest} cannot be read: {error.strerror or error}")
