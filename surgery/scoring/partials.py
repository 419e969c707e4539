"""Partial results of a long measurement, in a small file of the store, so that an interrupted measurement resumes.

    root/work/<what>-<key>.json      {phase: {"done": batches, "sums": {name: numbers}}}

`key` is a digest of everything that the result depends on, so a file is read only by the same measurement. An
unreadable file is ignored.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.errors import StoreError
from zoo.objects.publish import discard


@dataclass(frozen=True)
class Sums:
    """Sums over the batches done so far, float64, on the CPU."""

    done: int
    values: Mapping[str, Tensor]

    def with_batch(self, batch: Mapping[str, Tensor]) -> Sums:
        """Return the sums with another batch added."""
        added = {name: value.double().cpu() + self.values.get(name, 0.0) for name, value in batch.items()}
        return Sums(self.done + 1, added)


class Partials:
    """The file of one measurement."""

    def __init__(self, root: Path, what: str, key: str) -> None:
        """Read the file if it exists.

        Args:
            root: The store's folder.
        """
        self._path = root / "work" / f"{what}-{key}.json"
        self._phases = self._read()

    def sums(self, phase: str) -> Sums:
        """Return the sums of a phase so far."""
        try:
            kept = self._phases[phase]
            values = {str(name): torch.tensor(value, dtype=torch.float64) for name, value in kept["sums"].items()}
            return Sums(int(kept["done"]), values)
        except (KeyError, TypeError, ValueError, AttributeError):
            return Sums(0, {})

    def save_sums(self, phase: str, sums: Sums) -> None:
        """Write a phase's sums atomically. Raises StoreError if the store cannot be written."""
        self._phases[phase] = {"done": sums.done, "sums": {name: value.tolist() for name, value in sums.values.items()}}
        staged = self._path.with_name(f"{uuid.uuid4().hex}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            staged.write_text(json.dumps(self._phases), encoding="utf-8")
            staged.replace(self._path)
        except OSError as error:
            raise StoreError(f"cannot write to {self._path.parent}: {error.strerror or error}") from error
        finally:
            discard(staged)

    def remove(self) -> None:
        """Remove the file of a finished measurement."""
        discard(self._path)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
