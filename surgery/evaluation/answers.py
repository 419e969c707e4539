"""What a model has answered so far, in a file of the store: an evaluation that was stopped and is started again
asks only the rest.

    <store>/work/eval-<first 16 digits of the run's digest>.jsonl        a line per lot of questions: {"asked": digest,
                                                                         "answers": […]}

The run's digest names everything that an answer depends on but the questions. Lines are only added; one that cannot
be read counts as none. Knows nothing of models or tasks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.errors import StoreError
from zoo.manifest import digest_of


class Answers:
    """The file of one run."""

    def __init__(self, root: Path, described: Mapping[str, Any]) -> None:
        """Args: root: the store's folder; described: JSON; all that answers depend on but the questions."""
        self._path = root / "work" / f"eval-{digest_of(described)[:16]}.jsonl"
        self._known = _read(self._path)

    def load_answers(self, asked: str) -> list[Any] | None:
        """The answers to a lot of questions (its digest), or None."""
        return self._known.get(asked)

    def append_answers(self, asked: str, answers: list[Any]) -> None:
        """Add the answers to a lot. Raises StoreError when the store cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps({"asked": asked, "answers": answers}))  # behind a line that a kill has cut
        except OSError as error:
            raise StoreError(f"cannot write to {self._path.parent}: {error.strerror or error}") from error
        self._known[asked] = answers

    def remove_file(self) -> None:
        """The run is done: remove the file."""
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
