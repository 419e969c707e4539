"""Where the state of a stitch's training lies: one file per part of the task (`surgery.saved`).

    <store>/work/stitch-<first 16 digits of the task's digest>/<part>.safetensors

Knows nothing of what is trained.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surgery.saved import Saved, load_state, save_state
from zoo import locks
from zoo.errors import StoreBusy, StoreError
from zoo.manifest import digest_of

_LOCK_SECONDS = 1.0


class Task:
    """A piece of work that can be interrupted. `described`: JSON; all that the result depends on."""

    def __init__(self, root: Path, described: Mapping[str, Any]) -> None:
        self.digest = digest_of(described)
        self.folder = root / "work" / f"stitch-{self.digest[:16]}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the task from being done twice at once. Raises StoreBusy, StoreError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locks.exclusive(self.folder / "lock", _LOCK_SECONDS):
                yield
        except StoreBusy:
            raise StoreBusy("this very stitch is being trained by another process") from None
        except OSError as error:
            raise StoreError(f"{self.folder} cannot be used: {error.strerror or error}") from error

    def load(self, part: str) -> Saved | None:
        """What was saved of a part, or None. A file that cannot be read counts as none."""
        return load_state(self._path(part), self.digest)

    def save(self, part: str, saved: Saved) -> None:
        """Keep a state in place of the part's last one. Raises OSError."""
        save_state(self._path(part), self.digest, saved)

    def restart(self) -> None:
        """Forget what was saved."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink(missing_ok=True)

    def forget(self) -> None:
        """The task is done: remove its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.safetensors"
