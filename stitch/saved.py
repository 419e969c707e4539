"""Where the state of a stitch's training lies (`surgery.training.checkpoint`). Knows nothing of what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.training.checkpoint import TaskFolder


class StitchTask(TaskFolder):
    """A training of stitches that can be interrupted. `described`: JSON; all that the result depends on."""

    def __init__(self, root: Path, described: Mapping[str, Any]) -> None:
        super().__init__(root, "stitch", described)
