"""Write bytes as a durable, read-only file under a content address.

Three steps: stage (write, fsync), publish (rename), settle (fsync the folders).

    root/ab/abcd…    a published file, named by 64 hex digits; complete from the moment it has that name
    root/tmp/…       staged files; those that a killed process left are garbage

A staged file is durable before it gets its name, so a name never refers to partial bytes. A name is durable once its
folder is settled; callers settle before anything references it.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from zoo.errors import StoreError, StoreFull

_DIGEST = re.compile(r"[0-9a-f]{64}")
#: No space, over quota, over the process's file size limit: all reported as StoreFull.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_digest(text: str) -> bool:
    """Return whether a text is 64 lower-case hex digits; only such a text may become part of a path."""
    return _DIGEST.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Stamp:
    """Distinguishes a file from a later one under the same name."""

    inode: int
    size: int
    changed_ns: int


def stamp_of(path: Path) -> Stamp:
    """Return the file's stamp. Raises OSError."""
    status = path.stat()
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


class ObjectShelf:
    """A folder of files by content address. Safe for any number of threads and processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._temporary = root / "tmp"
        self._published: set[str] = set()

    def path(self, digest: str) -> Path:
        """Return the path of a digest's file, present or not. Raises StoreError if it is not a digest."""
        if not is_digest(digest):
            raise StoreError(f"{digest[:80]!r} is not a digest of 64 hex digits")
        return self.root / digest[:2] / digest

    def digests(self) -> Iterator[str]:
        """Yield all published digests, sorted. Files with other names are ignored."""
        for folder in _listing(self.root):
            if len(folder) == 2:
                yield from (
                    name for name in _listing(self.root / folder) if is_digest(name) and name.startswith(folder)
                )

    def temporaries(self) -> Iterator[Path]:
        """Yield the staged files of all processes."""
        return (self._temporary / name for name in _listing(self._temporary))

    def stage(self, chunks: Iterable[bytes | memoryview]) -> Path:
        """Write the chunks to a temporary file, durable and read-only.

        Raises StoreFull; on any error the file is removed.
        """
        path = self._temporary / uuid.uuid4().hex
        file = self._created(path)
        try:
            with file:
                for chunk in chunks:  # outside `_writing`: an unreadable source must not be reported as a failed write
                    with self._writing():
                        _write_all(file.fileno(), chunk)
                with self._writing():
                    os.fchmod(file.fileno(), 0o444)
                    os.fsync(file.fileno())
        except BaseException:
            discard(path)
            raise
        return path

    def publish(self, staged: Path, digest: str) -> None:
        """Rename a staged file to its digest, replacing an existing file.

        Readers that have the old file open keep it.
        """
        target = self.path(digest)
        with self._writing():
            target.parent.mkdir(exist_ok=True)
            staged.replace(target)
        self._published.add(digest)

    def take_published(self) -> set[str]:
        """Return the digests published by this object since the last call."""
        taken, self._published = self._published, set()
        return taken

    def settle(self, digests: Iterable[str], pool: Executor | None = None) -> None:
        """Make published names durable, from any process: one fsync per folder, in parallel in the pool."""
        folders = {self.path(digest).parent for digest in digests} | {self.root, self.root.parent}
        run = map if pool is None else pool.map
        with self._writing():
            for _ in run(_sync_folder, sorted(folders)):
                pass

    def size(self, digest: str) -> int:
        """Return the bytes of a published file, 0 if there is none."""
        try:
            return self.path(digest).lstat().st_size
        except OSError:
            return 0

    def remove(self, digest: str) -> int:
        """Remove a published file and return its size in bytes, 0 if there is none."""
        return discard(self.path(digest))

    def _created(self, path: Path) -> FileIO:
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            return FileIO(path, "xb")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Translate OSError into a StoreFull or StoreError with a one-line message."""
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFull(f"no space left in {self.root} ({error.strerror})") from error
            raise StoreError(f"cannot write to {self.root}: {error.strerror or error}") from error


def discard(path: Path) -> int:
    """Remove a file if it exists and return its size in bytes."""
    with suppress(FileNotFoundError):
        size = path.lstat().st_size
        path.unlink()
        return size
    return 0


def _listing(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _write_all(descriptor: int, chunk: bytes | memoryview) -> None:
    if not memoryview(chunk).nbytes:  # an empty view cannot be cast
        return
    view = memoryview(chunk).cast("B")
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
