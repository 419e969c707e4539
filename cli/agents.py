"""The engines that agents' processes can be, and `python -m cli.agents`: the program that a launcher starts.

Each row of the table imports what its kind needs when it is chosen, not before: an agent that counts needs no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.cluster.agent_main import Engines, MakeEngine, main
from runtime.engine.counted import CountingModel


class Counting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of an engine that counts. `pace`: its steps take this part of the time that they say they take."""

    models: tuple[CountingModel, ...]
    pages: int
    page_bytes: int = 64
    fail_at: tuple[int, ...] = ()
    pace: float = 0.0


def _counting(settings: Mapping[str, Any]) -> MakeEngine:
    """Integers in the place of tensors (`engine.counting`), for tests and rehearsals."""
    from runtime.engine.counting import CountingEngine

    chosen = msgspec.convert(dict(settings), Counting)

    def pace(busy: int) -> None:
        time.sleep(busy * chosen.pace / 1e9)

    return lambda: CountingEngine(
        chosen.models, chosen.pages, page_bytes=chosen.page_bytes, fail_at=chosen.fail_at, pace=pace if chosen.pace else None
    )


ENGINES: Engines = {"counting": _counting}

if __name__ == "__main__":
    sys.exit(main(ENGINES))
