"""Measurements so far, in a JSON file, so that an interrupted run resumes.

    {"key": digest of all that decides a tally, "done": {batch: {mixture: [loss, hits, count]}}}

A file with another key is discarded: its tallies are of other models or other questions. Each batch is written
atomically, through a temporary file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.experiments.scores import ScoreTally
from zoo.errors import InputError


class MeasurementLedger:
    """The tallies of one key. Mixtures requested later are added."""

    def __init__(self, path: Path, key: str) -> None:
        """Read the file if it exists."""
        self._path = path
        self._key = key
        self._done: dict[str, dict[str, Any]] = _read(path, key)

    def has(self, batch: str, mixture: str) -> bool:
        return mixture in self._done.get(batch, {})

    def tally(self, batch: str, mixture: str) -> ScoreTally:
        loss, hits, count = self._done[batch][mixture]
        return ScoreTally(float(loss), int(hits), int(count))

    def document(self, name: str, mixture: str) -> Any:
        """Return a value stored by `put_document`."""
        return self._done[name][mixture]

    def put(self, batch: str, tallies: Mapping[str, ScoreTally]) -> None:
        """Add a batch's tallies, by mixture, and write the file. Raises InputError if it cannot be written."""
        self._done.setdefault(batch, {}).update(
            {code: [each.loss, each.hits, each.count] for code, each in tallies.items()}
        )
        self._write()

    def put_document(self, name: str, mixture: str, value: Any) -> None:
        """Add any result of a mixture under a name of its own, and write the file."""
        self._done.setdefault(name, {})[mixture] = value
        self._write()

    def _write(self) -> None:
        partial = self._path.with_name(f".{self._path.name}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"key": self._key, "done": self._done}, allow_nan=False), encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            raise InputError(f"{self._path} cannot be written: {error.strerror}") from None


def _read(path: Path, key: str) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["key"] == key:
            return {str(batch): dict(tallies) for batch, tallies in found["done"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}
