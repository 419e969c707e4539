"""State of long, resumable work, as safetensors files: tensors, with the step and the task's digest in the header.

    <store>/work/<what>-<first 16 digits of the task's digest>/<part>.safetensors

The task's digest covers everything that the result depends on, so a file is only used by the same task. Files are
written to a temporary file and renamed: after a kill the previous state remains. No pickle.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zoo.errors import StoreBusy, StoreError
from zoo.manifest import canonical_json, digest_of
from zoo.objects import locks

_LOCK_SECONDS = 1.0


@dataclass(frozen=True)
class Saved:
    """A saved state: the number of steps done, tensors by name, and further facts as JSON."""

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)


def load_state(path: Path, task: str) -> Saved | None:
    """Load the state of this task (a digest); None if there is none or the file cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header.get("task") != task:
                return None
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return Saved(int(header["step"]), tensors, json.loads(header["facts"]))
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def save_state(path: Path, task: str, saved: Saved) -> None:
    """Save a state, replacing the file's previous one. Raises OSError."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        header = {"task": task, "step": str(saved.step), "facts": canonical_json(dict(saved.facts))}
        save_file(
            {key: tensor.detach().cpu().contiguous().clone() for key, tensor in saved.tensors.items()}, partial, header
        )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class TaskFolder:
    """The states of one task, a file per part."""

    def __init__(self, root: Path, what: str, described: Mapping[str, Any]) -> None:
        """Compute the task's digest and folder.

        Args:
            root: The store's folder.
            described: JSON; everything that the result depends on.
        """
        self.digest = digest_of(described)
        self.folder = root / "work" / f"{what}-{self.digest[:16]}"
        self._what = what

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the task's lock, so that it does not run twice at once. Raises StoreBusy, StoreError."""
        with ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locks.exclusive(self.folder / "lock", _LOCK_SECONDS))
            except StoreBusy:
                raise StoreBusy(f"this very {self._what} is being made by another process") from None
            except OSError as error:
                raise StoreError(f"{self.folder} cannot be used: {error.strerror or error}") from error
            yield

    def load(self, part: str) -> Saved | None:
        """Load the state of a part, with mapped tensors; None if there is none or the file cannot be read."""
        return load_state(self._path(part), self.digest)

    def save(self, part: str, saved: Saved) -> None:
        """Save a state, replacing the part's previous one. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)  # the previous holder may have removed it
        save_state(self._path(part), self.digest, saved)

    def restart(self) -> None:
        """Delete all saved states."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink(missing_ok=True)

    def remove_folder(self) -> None:
        """Remove the folder of a finished task."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.safetensors"
