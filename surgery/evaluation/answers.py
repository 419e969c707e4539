"""A model's answers so far, in a file of the store, so that an interrupted evaluation resumes with the rest.

    <store>/work/eval-<first 16 digits of the run's digest>.jsonl

Each line holds one batch of questions: {"asked": digest, "answers": […]}. The run's digest covers everything that an
answer depends on except the questions. Lines are only appended; an unreadable line is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.errors import StoreError
from zoo.manifest import digest_of


class Answers:
    """The answers of one run, in a file."""

    def __init__(self, root: Path, described: Mapping[str, Any]) -> None:
        """Read the file if it exists.

        Args:
            root: The store's folder.
            described: JSON; everything that answers depend on except the questions.
        """
        self._path = root / "work" / f"eval-{digest_of(described)[:16]}.jsonl"
        self._known = _read(self._path)

    def load_answers(self, asked: str) -> list[Any] | None:
        """Return the answers to a batch of questions (by its digest), or None."""
        return self._known.get(asked)

    def append_answers(self, asked: str, answers: list[Any]) -> None:
        """Append the answers to a batch. Raises StoreError if the store cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                # The newline comes first, since the last line may be cut.
                file.write("\n" + json.dumps({"asked": asked, "answers": answers}))
        except OSError as error:
            raise StoreError(f"cannot write to {self._path.parent}: {error.strerror or error}") from error
        self._known[asked] = answers

    def remove_file(self) -> None:
        """Remove the file of a finished run."""
        self._path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            lot = json.loads(line)
            found[str(lot["asked"])] = list(lot["answers"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found
