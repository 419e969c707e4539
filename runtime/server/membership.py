"""One server of a queue that several have: it takes over what the rest leave, and begins anew after a lost lease."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from runtime.queueing.database import QueueDatabase
from runtime.server.batches.batch_service import BatchService
from runtime.server.durable.runs import DurableRuns
from zoo.errors import StoreError

_log = logging.getLogger("blockzoo.server")

#: Looks per lease for what was left: what a dead server had waits its lease, and at most such a pause more.
_LOOKS = 4


class Membership:
    """Belongs to the server's event loop. `start` after everything that it takes over for has started."""

    def __init__(self, database: QueueDatabase, durable: DurableRuns, batches: BatchService) -> None:
        self._database = database
        self._durable = durable
        self._batches = batches
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._database.shared:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._database.lease / _LOOKS)
            try:
                if self._database.has_lost_lease:
                    await self._begin_anew()
                await self._durable.take_over()
                await self._durable.drop_ended()
                await self._batches.take_over()
            except StoreError as error:
                _log.warning("the queue: %s", error)
            except Exception:
                _log.exception("what other servers have left could not be taken over")

    async def _begin_anew(self) -> None:
        """Stop all that was taken over by now; then take part as a new server."""
        _log.error("this server's lease of the queue was over: its durable requests run on other servers now")
        with suppress(StoreError):
            await self._batches.stop()
        await self._durable.put_down()
        await asyncio.to_thread(self._database.rejoin)
        await self._batches.start()
