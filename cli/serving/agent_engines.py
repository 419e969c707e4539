"""The engines that agent processes can run, and `python -m cli.serving.agent_engines`, the program a launcher starts.

Each entry of `ENGINES` imports what it needs only when it is chosen: the counting engine needs no torch.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runtime.cluster.agent_process.main import Engines, MakeEngine, main
from runtime.config import EngineConfig
from runtime.engine.fakes.integer_model import IntegerModel
from runtime.processors import prepare_openmp

_Settings = TypeVar("_Settings")
#: Agents on threads begin together, and msgspec crashes where two threads look into a dataclass for the first time.
_CONVERTING = threading.Lock()


class Counting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the counting engine.

    Fields:
        pages: Pages of its pool.
        pools: Pages by device, where they are not `pages`.
        holders: Devices that can load the models; empty: all.
        fail_at: Numbers of the steps that fail.
        pace: Real duration of a step, as a share of the duration that it reports; 0: no wait.
    """

    models: tuple[IntegerModel, ...]
    pages: int
    page_bytes: int = 64
    fail_at: tuple[int, ...] = ()
    pace: float = 0.0
    pools: dict[str, int] = {}
    holders: tuple[str, ...] = ()


def _chosen(settings: Mapping[str, Any], kind: type[_Settings]) -> _Settings:
    """Return checked settings. Raises msgspec.ValidationError."""
    with _CONVERTING:
        return msgspec.convert(dict(settings), kind)


def _counting(settings: Mapping[str, Any]) -> MakeEngine:
    """Return the factory of an engine with integers instead of tensors, for tests (`engine.fakes.integer_links`)."""
    from runtime.engine.fakes.integer_links import LinkedIntegerEngine

    chosen = _chosen(settings, Counting)

    def pace(busy: int) -> None:
        time.sleep(busy * chosen.pace / 1e9)

    return lambda device: LinkedIntegerEngine(
        chosen.models if not chosen.holders or device in chosen.holders else (),
        chosen.pools.get(device, chosen.pages),
        page_bytes=chosen.page_bytes,
        fail_at=chosen.fail_at,
        pace=pace if chosen.pace else None,
    )


class Staged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the engine that runs stored models.

    Fields:
        half_page: Bytes of K in a page, the same on all agents.
        threads: CPU threads of torch.
        pools: Bytes of the page pool by device, where it is not the config's.
    """

    store: str
    database: str | None
    config: EngineConfig
    half_page: int
    threads: int
    pools: dict[str, int] = {}


def _staged(settings: Mapping[str, Any]) -> MakeEngine:
    """Return the factory of an engine that runs stages of stored models (`engine.executors.stage`)."""
    chosen = _chosen(settings, Staged)
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)  # read once, when torch is imported
    prepare_openmp()
    import torch

    from runtime.engine.executors.stage import StagedEngine
    from zoo.store import Store

    torch.set_num_threads(chosen.threads)

    def make(device: str) -> StagedEngine:
        pool = chosen.pools.get(device, chosen.config.kv_cache_memory_bytes)
        config = replace(chosen.config, kv_cache_memory_bytes=pool)
        return StagedEngine(Store.open(Path(chosen.store), chosen.database), config, chosen.half_page)

    return make


ENGINES: Engines = {"counting": _counting, "staged": _staged}

if __name__ == "__main__":
    sys.exit(main(ENGINES))
