"""The state that the routes of one server share. There are no globals: several servers may live in one process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from runtime.config import ServerConfig
from runtime.frontend.served_models import ServedModels
from runtime.server.capacity import Gate
from runtime.server.interfaces import Driver, ModelSource
from runtime.server.metrics import Metrics
from runtime.tracing.sink import Trace

T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """What every route needs. Lives as long as the application.

    Fields:
        source: The catalogue, for names, listings and tokenizers.
        gate: The limit on requests and sequences in the server.
        workers: At most four threads for tokenizing and formatting, so that many long prompts queue there and do not
            block the event loop.
        trace: The trace file's sink, None without `--trace`.
        changing: Held while a model is loaded or unloaded.
    """

    driver: Driver
    models: ServedModels
    source: ModelSource
    config: ServerConfig
    gate: Gate
    metrics: Metrics
    workers: ThreadPoolExecutor
    trace: Trace | None = None
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Run a CPU-bound function on a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)


def make_service(
    driver: Driver, models: ServedModels, source: ModelSource, config: ServerConfig, trace: Trace | None
) -> Service:
    return Service(
        driver=driver,
        models=models,
        source=source,
        config=config,
        gate=Gate(config.max_queued),
        metrics=Metrics(driver),
        workers=ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="zoo-frontend"),
        trace=trace,
    )
