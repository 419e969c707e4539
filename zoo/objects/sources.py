"""Input of an ingest: tensors as streams of bytes, with the checks and the digest that go with reading them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from blake3 import blake3

from zoo.errors import MalformedCheckpoint
from zoo.manifest import TensorMeta, canonical_json

#: Bytes read at a time from tensors that are not held in memory whole.
CHUNK_BYTES = 2 << 20
#: A batch of `put_many` ends at this many tensors or bytes, whichever comes first. This bounds the delay of progress
#: reports, not memory.
BATCH_TENSORS = 128
BATCH_BYTES = 512 << 20


class ByteSource(Protocol):
    """A tensor offered by an ingest: it can be read several times and gives the same bytes each time."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def chunks(self, size: int) -> Iterator[bytes | memoryview]:
        """Yield the bytes in order, at most `size` at a time. A view is valid until the next chunk is requested."""
        ...


def hasher_of(dtype: str, shape: tuple[int, ...]) -> blake3:
    """Return a BLAKE3 hasher fed with dtype and shape; the tensor's bytes follow.

    JSON holds no NUL, so no two tensors feed it the same bytes. The hasher uses one thread: `put_many` works on several
    tensors at once, one core hashes faster than disks deliver, and BLAKE3's own thread pool hangs in a forked child of
    a process that has used it.
    """
    return blake3(canonical_json([dtype, list(shape)]).encode() + b"\0")


def measured(source: ByteSource, size: int = CHUNK_BYTES) -> Iterator[bytes | memoryview]:
    """Yield the source's chunks and check their total size against `source.nbytes`.

    Raises MalformedCheckpoint as soon as there are more bytes, or at the end if there are fewer.
    """
    seen = 0
    for chunk in source.chunks(size):
        seen += memoryview(chunk).nbytes
        if seen > source.nbytes:
            break
        yield chunk
    if seen != source.nbytes:
        raise MalformedCheckpoint(
            f"a tensor of {source.nbytes} bytes came with {'more' if seen > source.nbytes else 'fewer'}"
        )


def again(source: ByteSource, header: bytes, tensor: TensorMeta) -> Iterator[bytes | memoryview]:
    """Yield header and bytes of a source that was read once before. Raises MalformedCheckpoint if its bytes changed."""
    hasher = hasher_of(tensor.dtype, tensor.shape)
    yield header
    for chunk in measured(source):
        hasher.update(chunk)
        yield chunk
    if hasher.hexdigest() != tensor.digest:
        raise MalformedCheckpoint("a tensor changed while it was read; is something still writing the checkpoint?")


def batches(sources: Iterable[ByteSource]) -> Iterator[list[ByteSource]]:
    """Yield the sources in order, in lists of at least one."""
    batch: list[ByteSource] = []
    nbytes = 0
    for source in sources:
        batch.append(source)
        nbytes += source.nbytes
        if len(batch) == BATCH_TENSORS or nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
