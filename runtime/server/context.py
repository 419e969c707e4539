"""The state that the routes of one server share. There are no globals: several servers may live in one process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from runtime.config import ServerConfig
from runtime.frontend.served_models import ServedModels
from runtime.grammars.checking import GrammarChecker
from runtime.server.capacity import Gate
from runtime.server.interfaces import Driver, ModelSource
from runtime.server.keys.key_book import KeyBook
from runtime.server.keys.key_metrics import KeyCollector
from runtime.server.keys.outbox import Outbox
from runtime.server.metrics import Metrics
from runtime.tracing.sink import Trace
from zoo.records import ClientKey
from zoo.store import Store

if TYPE_CHECKING:
    from runtime.queueing.database import QueueDatabase
    from runtime.server.answers.background import BackgroundRuns
    from runtime.server.durable.runs import DurableRuns

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
        durable: The requests that outlive the server, None without `--queue`.
        background: Responses that run in the background where they are not durable, None with `--queue`.
        grammars: What checks the grammars of answers.
        keys: The keys of clients, None without `--client-keys`.
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
    durable: DurableRuns | None = None
    background: BackgroundRuns | None = None
    grammars: GrammarChecker = field(kw_only=True)
    keys: KeyBook | None = None

    def key_of(self, principal: str) -> ClientKey | None:
        """Return the client's key of an owner; None for the server's own key, and where there are none."""
        return None if self.keys is None else self.keys.rules(principal)

    def admit(self, principal: str) -> None:
        """Count a request of an owner. Raises RequestError 429 where its key does not allow it now."""
        if self.keys is not None:
            self.keys.admit(principal)

    @contextmanager
    def announced(self, request: str) -> Iterator[None]:
        """Announce a request while it is prepared in a block; one that the block refuses does not come."""
        self.driver.expect_request(request)
        try:
            yield
        except BaseException:
            self.driver.expect_request(request, comes=False)
            raise

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Run a CPU-bound function on a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)


def make_service(
    driver: Driver,
    models: ServedModels,
    source: ModelSource,
    config: ServerConfig,
    trace: Trace | None,
    queue: QueueDatabase | None = None,
    store: Store | None = None,
) -> Service:
    grammars = GrammarChecker()
    keys = None
    if store is not None and config.client_keys:
        keys = KeyBook(store, outbox=None if queue is None else Outbox(queue))
    service = Service(
        driver=driver,
        models=models,
        source=source,
        config=config,
        gate=Gate(config.max_queued),
        metrics=Metrics(driver, grammars),
        grammars=grammars,
        workers=ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="zoo-frontend"),
        trace=trace,
        keys=keys,
    )
    if keys is not None:
        service.metrics.registry.register(KeyCollector(keys))
    if queue is None:
        from runtime.server.answers.background import BackgroundRuns

        return replace(service, background=BackgroundRuns(config.retention_hours * 3600))
    from runtime.server.durable.metrics import QueueCollector
    from runtime.server.durable.runs import DurableRuns

    durable = DurableRuns(service, queue)
    service.metrics.registry.register(QueueCollector(durable))
    return replace(service, durable=durable)
