"""Create the folder for a cluster's sockets: only its user can enter it.

It is removed with the cluster, or, if the process was killed, when the next cluster starts: each folder holds a file
that its process keeps locked while it lives, and a later process removes folders of the same user without a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from zoo.errors import InputError

_PREFIX = "zoo-agents-"
_LOCK = "lock"
#: Longest path of a folder, so that socket paths in it stay below the system's limit (104 bytes, 108 on Linux).
_MOST_BYTES = 64


class SocketFolder:
    """Create, lock and remove a folder for sockets. `path` has mode 0700."""

    def __init__(self, parent: Path | None = None) -> None:
        """Create the folder in `parent`, by default the directory of temporary files.

        Raises InputError if the path is too long or the folder cannot be created.
        """
        parent = parent or Path(tempfile.gettempdir())
        if len(os.fsencode(parent / _PREFIX)) + 8 > _MOST_BYTES:
            raise InputError(
                f"sockets cannot lie in {parent}, whose path is too long for them: set TMPDIR to a shorter one"
            )
        _sweep(parent)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = os.open(self.path / f".{_LOCK}", os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise InputError(f"there can be no folder for sockets in {parent}: {error.strerror}") from None
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / f".{_LOCK}").rename(self.path / _LOCK)  # renamed only now, so that it is never found unlocked

    def remove(self) -> None:
        """Remove the folder with its contents. Does nothing the second time."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep(parent: Path) -> None:
    """Remove folders of processes that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use by another process, or just removed
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
