"""Follow a request that another server runs: publish what that one writes, for clients that came to this one."""

from __future__ import annotations

import asyncio
from functools import partial

from runtime.queueing import requests
from runtime.queueing.records import ENDED, decode_events
from runtime.server.context import Service
from runtime.server.durable.endings import Endings, prepared_here
from runtime.server.durable.run import DurableRun
from runtime.server.durable.store import RequestStore
from runtime.server.durable.transcript import Transcript

#: Seconds between two looks at what the other server has written.
LOOK = 0.05


class Follower:
    """Follows requests for one server."""

    def __init__(self, service: Service, store: RequestStore, endings: Endings) -> None:
        self._service = service
        self._store = store
        self._endings = endings

    async def follow(self, run: DurableRun, request: str) -> bool:
        """Publish what is written of a request until it has ended: then the run is closed with its answer.

        Returns False, with the run open, once no other server has it. Raises StoreError, and as `prepare_served`.
        """
        run.elsewhere = True
        try:
            return await self._follow(run, request)
        finally:
            run.elsewhere = False

    async def _follow(self, run: DurableRun, request: str) -> bool:
        transcript: Transcript | None = None
        while True:
            behind = -1 if transcript is None else transcript.count - 1
            found = await self._store.read(partial(requests.watched, request=request, behind=behind))
            if found is None:
                return False
            if found.state in ENDED:
                await self._endings.close_as_stored(run)
                return True
            if not found.owned or found.owner == self._store.database.server:
                return False
            if found.events:
                if transcript is None:
                    transcript = await self._transcript(request)
                    run.publish(transcript.opening)
                events = decode_events(request, found.events)
                run.publish((await self._service.in_worker(partial(transcript.add_events, events))).chunks)
            await asyncio.sleep(LOOK)

    async def _transcript(self, request: str) -> Transcript:
        stored = await self._store.read(partial(requests.get, request=request))
        if stored is None:
            raise LookupError(request)
        return Transcript(await prepared_here(self._service, stored))
