"""Reads of the catalogue for pages: on a few threads of their own, with a bound on how many wait.

The engine's threads and the event loop do no work for pages. The sizes of all models, the one read that grows with the
whole store, are kept until the models or the numbers of their blocks change.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from runtime.frontend.errors import unavailable
from zoo.catalog import ModelEntry, ModelSummary, Reader
from zoo.store import Store

T = TypeVar("T")
#: Threads, and reads that run or wait, at most.
THREADS, MOST_READS = 2, 32


@dataclass(frozen=True)
class StoreOverview:
    """All models with their sizes, and the bytes of all distinct tensors."""

    models: tuple[ModelSummary, ...]
    bytes_distinct: int

    @property
    def bytes_whole(self) -> int:
        """Bytes that the models would take if each were stored whole."""
        return sum(model.bytes for model in self.models)


class CatalogueReads:
    """Runs reads of one store's catalogue for pages."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="zoo-page")
        self._waiting = 0
        self._making = threading.Lock()
        self._kept: tuple[list[ModelEntry], Mapping[int, int], StoreOverview] | None = None

    async def run(self, work: Callable[[Reader], T]) -> T:
        """Run a function of a reader on a thread. Raises RequestError 503 if too many wait, and what `work` raises."""
        return await self.apart(lambda: self._with_reader(work))

    async def apart(self, work: Callable[[], T]) -> T:
        """Run a function on a thread, as `run` does."""
        if self._waiting >= MOST_READS:
            raise unavailable("Too many pages are being read. Try again in a moment.", retry_after=1)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def read_ahead(self) -> None:
        """Begin to read the sizes of all models, so that the first view of them need not. Errors are left to that."""
        self._threads.submit(self._with_reader, self.overview)

    def overview(self, reader: Reader) -> StoreOverview:
        """Return the sizes of all models. Call it on a thread of `run`."""
        entries, blocks = reader.entries(), reader.block_counts()
        with self._making:
            if self._kept is None or self._kept[:2] != (entries, blocks):
                overview = StoreOverview(tuple(reader.models()), reader.tensor_bytes())
                self._kept = (entries, blocks, overview)
            return self._kept[2]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _with_reader(self, work: Callable[[Reader], T]) -> T:
        with self.store.catalog.reading() as reader:
            return work(reader)
