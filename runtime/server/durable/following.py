"""Follow a request that another server runs: publish what that one writes, for clients that came to this one."""

from __future__ import annotations

import asyncio
from functools import partial

from runtime.frontend.assemble import Receipt
from runtime.queueing import requests
from runtime.queueing.records import ENDED, DurableRequest, decode_events
from runtime.server.answers.forms import form_of_kind
from runtime.server.context import Service
from runtime.server.durable.run import DurableRun
from runtime.server.durable.store import RequestStore
from runtime.server.durable.transcript import Transcript, chunks_of
from runtime.server.request_runner import prepare_served

#: Seconds between two looks at what the other server has written.
LOOK = 0.05


class Follower:
    """Follows requests for one server."""

    def __init__(self, service: Service, store: RequestStore) -> None:
        self._service = service
        self._store = store

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
                answer = await self._store.answer(request)
                if answer is not None and answer.stream is not None:
                    run.publish(chunks_of(answer.stream))
                run.close(answer)
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
        return Transcript(
            await prepare_served(self._service, form_of_kind(stored.kind).body, stored.body or b"", receipt_of(stored))
        )


def receipt_of(request: DurableRequest) -> Receipt:
    """Return the receipt of a request that arrives now, for its text alone."""
    return Receipt(request.id, request.created // 10**9, 0, request.seed, principal=request.principal)
