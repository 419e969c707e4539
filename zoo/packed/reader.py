"""Read packed objects: decode them chunk by chunk in parallel threads, and verify them against their digest.

The decoded bytes are hashed, so neither the packed file nor its base needs to be trusted or hashed separately. Memory:
a few chunks per thread beside the result. Safe for any number of threads and processes. This module does not depend on
models, the catalogue or locks.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from zoo.errors import DamagedObject, MissingObject
from zoo.manifest import TensorMeta
from zoo.objects.headers import object_header
from zoo.objects.publish import ObjectShelf, Stamp, stamp_of
from zoo.objects.sources import CHUNK_BYTES, hasher_of
from zoo.packed.layout import LENGTH_BYTES, MAGIC, PackedTable, Unreadable, parse_table, table_bytes

_Result = TypeVar("_Result")

#: Maximum number of threads that decode one tensor.
WORKERS = 8
#: Minimum number of chunks per thread: decoding one takes about as long as starting a thread.
_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class Decoded:
    """A verified object in memory; the caller owns the bytes."""

    tensor: TensorMeta
    data: memoryview


class _Scratch:
    """Buffers and decoder for one thread to decode a tensor's chunks one after the other."""

    def __init__(self, table: PackedTable) -> None:
        from zoo.packed import planes  # imported here: numpy and zstd are needed only for stores with packed objects

        size = min(table.chunk, table.tensor.nbytes)
        self._width, self._delta = table.width, table.delta
        self._coded, self._base = planes.empty(size), planes.empty(size if table.base else 0)
        self._decoder = planes.Decoder()

    def decode(self, coded: Coded, index: int, out: memoryview) -> None:
        from zoo.packed.planes import elements_of

        sizes = coded.table.planes[index]
        read = filled(coded.file, self._coded[: sum(sizes)], coded.starts[index])
        parts = [read[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)]
        base = None
        if coded.base is not None:
            begin, end = coded.table.plain(index)
            base = filled(coded.base, self._base[: end - begin], coded.base_start + begin)
        try:
            self._decoder.decode(parts, base, self._delta, elements_of(out, self._width))
        except ValueError as error:
            raise Unreadable(f"chunk {index}: {error}") from error


@dataclass(frozen=True, slots=True)
class Coded:
    """An open packed file and, if it has one, its open base.

    Fields:
        file: File descriptor of the packed file.
        starts: `starts[i]` is the offset of chunk i's planes in the file.
        base: File descriptor of the base.
        base_start: Offset of the base's data in its file.
    """

    table: PackedTable
    file: int
    starts: tuple[int, ...]
    base: int | None
    base_start: int
    _spare: list[_Scratch] = field(default_factory=list)

    def decode(self, index: int, out: memoryview) -> None:
        """Decode chunk `index` into memory of its plain size. Raises Unreadable, OSError."""
        try:
            scratch = self._spare.pop()
        except IndexError:
            scratch = _Scratch(self.table)
        scratch.decode(self, index, out)
        self._spare.append(scratch)

    def chunks(self, out: memoryview | None = None) -> Iterator[memoryview]:
        """Yield the tensor's bytes in order, in new memory or in `out` if given. Raises Unreadable, OSError."""
        from zoo.packed import planes

        def decoded(index: int) -> memoryview:
            begin, end = self.table.plain(index)
            target = planes.empty(end - begin) if out is None else out[begin:end]
            self.decode(index, target)
            return target

        return in_order(decoded, len(self.table.planes), min(WORKERS, len(self.table.planes) // _PER_WORKER))


class PackedStore:
    """Packed objects under `root`; their bases are on the shelf `plain`."""

    def __init__(self, root: Path, plain: ObjectShelf) -> None:
        self.shelf = ObjectShelf(root)
        self._plain = plain
        self._verified: dict[str, tuple[Stamp, ...]] = {}

    def load(self, digest: str) -> Decoded:
        """Return the object in memory, verified on every call. Raises DamagedObject; MissingObject if not packed."""
        from zoo.packed import planes

        with self.opened(digest) as coded:
            try:
                out = planes.empty(coded.table.tensor.nbytes)
            except MemoryError as error:
                raise DamagedObject(
                    f"object {digest} cannot be read: there is no memory for {coded.table.tensor.nbytes:,} bytes"
                ) from error
            for _ in self._checked(digest, coded, out):
                pass
            return Decoded(coded.table.tensor, out)

    def read(self, digest: str, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield its bytes, at most `size` at a time, verified on the way.

        Raises as `load` does; MissingObject at once.
        """
        with ExitStack() as stack:
            coded = stack.enter_context(self.opened(digest))
            return self._sliced(digest, coded, size, stack.pop_all())

    def verify(self, digest: str) -> None:
        """Decode and hash it on first use in this process, and again when its file or its base's has changed.

        Raises as `load` does.
        """
        with self.opened(digest) as coded:
            stamps = self._stamps(digest, coded.table)
            if self._verified.get(digest) != stamps:
                for _ in self._checked(digest, coded):
                    pass
                self._verified[digest] = stamps

    def clear_verified(self, digest: str) -> None:
        """Make the next `verify` read the object again."""
        self._verified.pop(digest, None)

    def table(self, digest: str) -> PackedTable:
        """Return the object's table. Raises DamagedObject, MissingObject."""
        with self._file(digest) as (_, table):
            return table

    def dependents(self) -> dict[str, list[str]]:
        """Return base -> the objects packed against it; objects with an unreadable table are left out."""
        found: dict[str, list[str]] = defaultdict(list)
        for digest in self.shelf.digests():
            with suppress(DamagedObject):
                if (base := self.table(digest).base) is not None:
                    found[base].append(digest)
        return dict(found)

    @contextmanager
    def opened(self, digest: str) -> Iterator[Coded]:
        """Hold its file and its base's open, so that they stay readable if removed meanwhile.

        Raises DamagedObject, MissingObject.
        """
        with ExitStack() as stack:
            file, table = stack.enter_context(self._file(digest))
            starts = tuple(accumulate((sum(row) for row in table.planes), initial=len(MAGIC)))
            if table.base is None:
                yield Coded(table, file, starts, None, 0)
                return
            header = object_header(table.tensor.dtype, table.tensor.shape)
            base = stack.enter_context(self._base(digest, table.base, len(header) + table.tensor.nbytes))
            yield Coded(table, file, starts, base, len(header))

    @contextmanager
    def _file(self, digest: str) -> Iterator[tuple[int, PackedTable]]:
        with ExitStack() as stack:
            try:
                file = stack.enter_context(_open(self.shelf.path(digest)))
                table = _read_table(file, digest)
            except FileNotFoundError as error:
                raise MissingObject(f"object {digest} is missing from the store") from error
            except (OSError, Unreadable) as error:
                raise _damaged(digest, error) from error
            yield file, table

    @contextmanager
    def _base(self, digest: str, base: str, size: int) -> Iterator[int]:
        with ExitStack() as stack:
            try:
                descriptor = stack.enter_context(_open(self._plain.path(base)))
                if os.fstat(descriptor).st_size != size:
                    raise Unreadable(f"its base {base} has another size")
            except FileNotFoundError as error:
                if self.shelf.path(digest).exists():
                    raise DamagedObject(
                        f"object {digest} is damaged: its base {base} is missing from the store"
                    ) from error
                raise MissingObject(
                    f"object {digest} is missing from the store"
                ) from error  # it was unpacked and collected meanwhile
            except (OSError, Unreadable) as error:
                raise _damaged(digest, error) from error
            yield descriptor

    def _checked(self, digest: str, coded: Coded, out: memoryview | None = None) -> Iterator[memoryview]:
        hasher = hasher_of(coded.table.tensor.dtype, coded.table.tensor.shape)
        try:
            for chunk in coded.chunks(out):
                hasher.update(chunk)
                yield chunk
        except (OSError, Unreadable) as error:
            raise _damaged(digest, error) from error
        if hasher.hexdigest() != digest:
            raise DamagedObject(f"object {digest} is damaged: {_cause(coded)}")

    def _sliced(self, digest: str, coded: Coded, size: int, files: ExitStack) -> Iterator[bytes]:
        with files:
            for chunk in self._checked(digest, coded):
                yield from (bytes(chunk[begin : begin + size]) for begin in range(0, len(chunk), size))

    def _stamps(self, digest: str, table: PackedTable) -> tuple[Stamp, ...]:
        paths = [self.shelf.path(digest), *([self._plain.path(table.base)] if table.base else [])]
        try:
            return tuple(stamp_of(path) for path in paths)
        except OSError as error:
            raise MissingObject(f"object {digest} is missing from the store") from error


def in_order(job: Callable[[int], _Result], count: int, workers: int) -> Iterator[_Result]:
    """Yield `job(0)`, `job(1)`, … in order, run in parallel threads; at most twice as many as threads are in flight.

    With few jobs they run in the calling thread.
    """
    threads = min(workers, count // 2, _cores())
    if threads < 2:
        yield from map(job, range(count))
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="zoo-pack") as pool:
        running: deque[Future[_Result]] = deque()
        for index in range(count):
            running.append(pool.submit(job, index))
            if len(running) == 2 * threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not available on every system
        return os.cpu_count() or 1


def _cause(coded: Coded) -> str:
    """Return why decoded bytes are wrong: the base or the packed file itself is damaged."""
    table = coded.table
    if coded.base is None or table.base is None:
        return "its bytes do not match its digest"
    hasher = hasher_of(table.tensor.dtype, table.tensor.shape)
    for index in range(len(table.planes)):
        begin, end = table.plain(index)
        hasher.update(exactly(coded.base, end - begin, coded.base_start + begin))
    return (
        "its bytes do not match its digest" if hasher.hexdigest() == table.base else f"its base {table.base} is damaged"
    )


@contextmanager
def _open(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_table(file: int, digest: str) -> PackedTable:
    size = os.fstat(file).st_size
    length = table_bytes(exactly(file, LENGTH_BYTES, max(size - LENGTH_BYTES, 0)), size)
    if exactly(file, len(MAGIC), 0) != MAGIC:
        raise Unreadable("it does not begin as a packed file does")
    return parse_table(exactly(file, length, size - LENGTH_BYTES - length), digest, size)


def exactly(file: int, size: int, offset: int) -> bytes:
    """Return `size` bytes from `offset`."""
    return bytes(filled(file, memoryview(bytearray(size)), offset))


def filled(file: int, buffer: memoryview, offset: int) -> memoryview:
    """Fill a buffer with the bytes from `offset`; a single read may return fewer. Raises Unreadable, OSError."""
    done = 0
    while done < len(buffer):
        read = os.preadv(file, [buffer[done:]], offset + done)
        if not read:
            raise Unreadable("it is truncated")
        done += read
    return buffer


def _damaged(digest: str, error: OSError | Unreadable) -> DamagedObject:
    if isinstance(error, OSError):
        return DamagedObject(f"object {digest} cannot be read: {error.strerror or error}")
    return DamagedObject(f"object {digest} is damaged: {error}")
