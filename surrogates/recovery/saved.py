"""Where the state of a recovery lies: one file per task (`surgery.training.checkpoint`).

    <store>/work/surrogate-<first 16 digits of the task's digest>.safetensors

Knows nothing of what is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.training.checkpoint import Saved, load_state, save_state
from zoo.manifest import digest_of


class RecoveryTask:
    """A piece of training that can be interrupted. `settings`: JSON; all that the result depends on."""

    def __init__(self, root: Path, settings: Mapping[str, Any]) -> None:
        self.digest = digest_of(settings)
        self.path = root / "work" / f"surrogate-{self.digest[:16]}.safetensors"

    def load(self) -> Saved | None:
        """What was saved of this very task, or None. A file that cannot be read counts as none."""
        return load_state(self.path, self.digest)

    def save(self, saved: Saved) -> None:
        """Keep a state in place of the last one. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_state(self.path, self.digest, saved)

    def remove_folder(self) -> None:
        """Remove what was saved: the task is done."""
        self.path.unlink(missing_ok=True)
