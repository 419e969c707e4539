"""The state of a training that can be stopped, as one safetensors file: tensors, the step, and whose state it is in the header.

The task's digest names everything that the result depends on, so that a file is only ever taken up by the very same task. Written to a
temporary file and renamed: a kill in between leaves the one before. No pickle. Knows nothing of what is trained, nor where files lie.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zoo.manifest import canonical_json


@dataclass(frozen=True)
class Saved:
    """What was saved: the number of steps done, tensors by name, and further facts as JSON."""

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)


def load_state(path: Path, task: str) -> Saved | None:
    """What was saved of this very task (a digest), or None. A file that cannot be read counts as none."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header.get("task") != task:
                return None
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        return Saved(int(header["step"]), tensors, json.loads(header["facts"]))
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def save_state(path: Path, task: str, saved: Saved) -> None:
    """Keep a state in place of the file's last one. Raises OSError."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        header = {"task": task, "step": str(saved.step), "facts": canonical_json(dict(saved.facts))}
        save_file({key: tensor.detach().cpu().contiguous().clone() for key, tensor in saved.tensors.items()}, partial, header)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
