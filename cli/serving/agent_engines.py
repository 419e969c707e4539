"""The engines that agents' processes can be, and `python -m cli.serving.agent_engines`: the program that a launcher
starts.

Each row of the table imports what its kind needs when it is chosen, not before: an agent that counts needs no torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from runtime.cluster.agent_process.main import Engines, MakeEngine, main
from runtime.config import EngineConfig
from runtime.engine.fakes.integer_model import IntegerModel


class Counting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of an engine that counts. `pace`: its steps take this part of the time that they say they take."""

    models: tuple[IntegerModel, ...]
    pages: int
    page_bytes: int = 64
    fail_at: tuple[int, ...] = ()
    pace: float = 0.0


def _counting(settings: Mapping[str, Any]) -> MakeEngine:
    """Integers in the place of tensors (`engine.fakes.integer_engine`), for tests and rehearsals."""
    from runtime.engine.fakes.integer_links import LinkedIntegerEngine

    chosen = msgspec.convert(dict(settings), Counting)

    def pace(busy: int) -> None:
        time.sleep(busy * chosen.pace / 1e9)

    return lambda: LinkedIntegerEngine(
        chosen.models,
        chosen.pages,
        page_bytes=chosen.page_bytes,
        fail_at=chosen.fail_at,
        pace=pace if chosen.pace else None,
    )


class Staged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of an engine that runs stored models. `half_page`: bytes of K in a page, alike for all agents;
    `threads`: of a CPU.
    """

    store: str
    database: str | None
    config: EngineConfig
    half_page: int
    threads: int


def _staged(settings: Mapping[str, Any]) -> MakeEngine:
    """Parts of stored models (`engine.executors.stage`)."""
    chosen = msgspec.convert(dict(settings), Staged)
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)  # read once, when torch is imported
    import torch

    from runtime.engine.executors.stage import StagedEngine
    from zoo.store import Store

    torch.set_num_threads(chosen.threads)
    return lambda: StagedEngine(Store.open(Path(chosen.store), chosen.database), chosen.config, chosen.half_page)


ENGINES: Engines = {"counting": _counting, "staged": _staged}

if __name__ == "__main__":
    sys.exit(main(ENGINES))
