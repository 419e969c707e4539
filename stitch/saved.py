"""Training that goes on where it stopped: one safetensors file per part of a task, with the step and the task's digest in its header.

    <store>/work/stitch-<first 16 digits of the task's digest>/<part>.safetensors

The digest names everything that the result depends on, so that a file is only ever taken up by the very same task. Written to a
temporary file and renamed: a kill in between leaves the one before. Knows nothing of what is trained.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zoo import locks
from zoo.errors import StoreBusy, StoreError
from zoo.manifest import canonical_json, digest_of

_LOCK_SECONDS = 1.0


@dataclass(frozen=True)
class Saved:
    """What was saved: the number of steps done, tensors by name, and further facts as JSON."""

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)


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
        try:
            with safe_open(self._path(part), "pt") as file:
                header = file.metadata() or {}
                if header.get("task") != self.digest:
                    return None
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            return Saved(int(header["step"]), tensors, json.loads(header["facts"]))
        except (OSError, SafetensorError, KeyError, ValueError):
            return None

    def save(self, part: str, saved: Saved) -> None:
        """Keep a state in place of the part's last one. Raises OSError."""
        path = self._path(part)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            header = {"task": self.digest, "step": str(saved.step), "facts": canonical_json(dict(saved.facts))}
            save_file({key: tensor.detach().cpu().contiguous().clone() for key, tensor in saved.tensors.items()}, partial, header)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def restart(self) -> None:
        """Forget what was saved."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink(missing_ok=True)

    def forget(self) -> None:
        """The task is done: remove its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.safetensors"
