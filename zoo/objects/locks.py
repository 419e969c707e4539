"""The store-wide lock: many shared holders (ingests, exports, audits) or one collector, across processes and threads.

It is `flock` on one file, so the kernel releases it when the process ends in any way. Each holder opens the file for
itself: two holders in one process exclude each other as two processes do. A steady stream of shared holders can delay a
collector; it then gives up with StoreBusy instead of blocking them.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zoo.errors import StoreBusy

#: Seconds between two attempts: `flock` has no timeout of its own.
_PAUSE = 0.02


@contextmanager
def shared(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock in shared mode. Raises StoreBusy after `timeout` seconds."""
    with _held(path, fcntl.LOCK_SH, timeout):
        yield


@contextmanager
def exclusive(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock exclusively. Raises StoreBusy after `timeout` seconds."""
    with _held(path, fcntl.LOCK_EX, timeout):
        yield


@contextmanager
def _held(path: Path, kind: int, timeout: float) -> Iterator[None]:
    descriptor = _locked(path, kind, timeout)
    try:
        yield
    finally:
        # Unlock explicitly, not only by closing: a child forked meanwhile shares the lock through its copy of the
        # descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _locked(path: Path, kind: int, timeout: float) -> int:
    """Return a descriptor that holds the lock of the file that has this name now.

    A process that removes a lock file holds the lock and removes the file last, so a lock on a removed file is retried.
    """
    # Over NFS an exclusive lock needs a writable descriptor; a shared one must do on a read-only mount.
    access = os.O_RDWR if kind == fcntl.LOCK_EX else os.O_RDONLY
    while True:
        descriptor = os.open(path, access | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _wait(descriptor, path, kind, timeout)
            if _is_named(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _wait(descriptor: int, path: Path, kind: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise StoreBusy(f"the store's lock {path} is held by another process (waited {timeout:g} s)") from None
            time.sleep(_PAUSE)
