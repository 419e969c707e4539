"""Output of the benchmarks' documents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def deliver(document: Mapping[str, Any], output: Path | None) -> None:
    """Print the document as JSON, and write it to a file if one is given."""
    text = json.dumps(document, indent=2)
    print(text)
    if output:
        output.write_text(text + "\n")
