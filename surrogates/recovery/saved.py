"""The file of a recovery's state, one per task (`surgery.training.checkpoint`).

<store>/work/surrogate-<first 16 digits of the task's digest>.safetensors
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.training.checkpoint import Saved, load_state, save_state
from zoo.manifest import digest_of


class RecoveryTask:
    """A resumable training.

    Args:
        settings: JSON; everything that the result depends on.
    """

    def __init__(self, root: Path, settings: Mapping[str, Any]) -> None:
        self.digest = digest_of(settings)
        self.path = root / "work" / f"surrogate-{self.digest[:16]}.safetensors"

    def load(self) -> Saved | None:
        """Load the state of this task; None if there is none or the file cannot be read."""
        return load_state(self.path, self.digest)

    def save(self, saved: Saved) -> None:
        """Save a state, replacing the previous one. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_state(self.path, self.digest, saved)

    def remove_file(self) -> None:
        """Remove the state of a finished task."""
        self.path.unlink(missing_ok=True)
