"""Training that goes on where it stopped: one safetensors file per task, with the step and the task's settings in its header.

    <store>/work/surrogate-<first 16 digits of the task's digest>.safetensors

The digest names everything that the result depends on, so that a file is only ever taken up by the very same task. Written to a
temporary file and renamed: a kill in between leaves the one before. Knows nothing of what is trained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zoo.manifest import canonical_json, digest_of


@dataclass(frozen=True)
class Saved:
    """What was saved: the number of steps done, further JSON facts, and tensors by name."""

    step: int
    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Task:
    """A piece of training that can be interrupted. `settings`: JSON; all that the result depends on."""

    def __init__(self, root: Path, settings: Mapping[str, Any]) -> None:
        self.digest = digest_of(settings)
        self.path = root / "work" / f"surrogate-{self.digest[:16]}.safetensors"

    def load(self) -> Saved | None:
        """What was saved of this very task, or None. A file that cannot be read counts as none."""
        try:
            with safe_open(self.path, "pt") as file:
                header = file.metadata() or {}
                if header.get("task") != self.digest:
                    return None
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            return Saved(int(header["step"]), json.loads(header["facts"]), tensors)
        except (OSError, SafetensorError, KeyError, ValueError):
            return None

    def save(self, saved: Saved) -> None:
        """Keep a state in place of the last one. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        try:
            header = {"task": self.digest, "step": str(saved.step), "facts": canonical_json(dict(saved.facts))}
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in saved.tensors.items()}, partial, header)
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove what was saved: the task is done."""
        self.path.unlink(missing_ok=True)
