"""Write a log line by line while a cluster runs: the scheduler's log, for `zoo simulate --replay`.

A write error (a full disk) ends the log with one warning and never affects the cluster. Only the owner can read the
file, because it contains prompts.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from zoo.errors import InputError

_log = logging.getLogger(__name__)


class LogFile:
    """A log file, written by one thread at a time and closed afterwards.

    Raises InputError for a path that cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                os.fchmod(self._file.fileno(), 0o600)  # an existing file keeps its mode otherwise
        except OSError as error:
            raise InputError(f"the log cannot be written to {path}: {error.strerror}") from None
        self._ended = False

    def write(self, line: bytes) -> None:
        """Write one line; nothing once the log has ended."""
        if not self._ended:
            try:
                self._file.write(line)
            except OSError as error:
                self._end(error)

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            try:
                self._file.close()
            except OSError as error:
                self._end(error)

    def _end(self, error: OSError) -> None:
        self._ended = True
        _log.warning("the log in %s ends here: %s", self._path, error.strerror)
