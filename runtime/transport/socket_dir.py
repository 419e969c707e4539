"""The folder that a cluster's sockets lie in: only its user can enter it, and it goes with the cluster, or when the
next one begins.

Who is killed cannot tidy up. So a folder holds a file that its process has locked for as long as it lives, and whoever
begins later removes those of this user whose lock is free. Knows no sockets.
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
#: Of a folder's path, so that paths of sockets in it stay below what systems take (104 bytes, 108 on Linux).
_MOST_BYTES = 64


class SocketFolder:
    """See the top of the file. `path`: of mode 0700."""

    def __init__(self, parent: Path | None = None) -> None:
        """In `parent`, by default where temporary files are. Raises InputError if its path is too long, or it cannot be
        made.
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
        (self.path / f".{_LOCK}").rename(self.path / _LOCK)  # only now: nobody finds it unlocked

    def remove(self) -> None:
        """With all that is in it. Again: nothing to do."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep(parent: Path) -> None:
    """Remove what processes that were killed have left."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another one's, or just gone
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
