"""The folder of a stitch training's state (`surgery.training.checkpoint`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.training.checkpoint import TaskFolder


class StitchTask(TaskFolder):
    """A resumable training of stitches.

    Args:
        described: JSON; everything that the result depends on.
    """

    def __init__(self, root: Path, described: Mapping[str, Any]) -> None:
        super().__init__(root, "stitch", described)
