"""What every benchmark does with its document at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def deliver(document: Mapping[str, Any], output: Path | None) -> None:
    """Print it as JSON, and write the same into a file where one is asked for."""
    text = json.dumps(document, indent=2)
    print(text)
    if output:
        output.write_text(text + "\n")
