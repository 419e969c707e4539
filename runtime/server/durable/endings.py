"""How durable requests end: with the answer of their run, with an error, or as another server has ended them.

A stream that has begun does not just stop. Behind its last event comes what the store has of it, or the event of an
error, and every server publishes the same bytes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial

from runtime.frontend.assemble import Receipt
from runtime.frontend.errors import RequestError
from runtime.frontend.schemas import GeneratingBody, parse
from runtime.queueing import requests
from runtime.queueing.records import DurableRequest, State, StoredAnswer
from runtime.queueing.requests import MOST_ATTEMPTS
from runtime.server.answers.forms import form_of_kind
from runtime.server.context import Service
from runtime.server.durable.charging import settle, usage_of, usage_of_events
from runtime.server.durable.run import DurableRun
from runtime.server.durable.store import RequestStore
from runtime.server.durable.transcript import Chunk, Transcript, broken_off, chunks_of, joined
from runtime.server.openai.responses import dump
from runtime.server.request_runner import Prepared, prepare_served
from zoo.errors import ZooError

_log = logging.getLogger("blockzoo.server")


def _refusal(error: RequestError, stream: bytes | None = None) -> StoredAnswer:
    return StoredAnswer(error.status, dump(error.body()), stream)


_ABORTED = RequestError("The request was aborted.", status=409, code="request_aborted")
_REMOVED = _refusal(RequestError("The request was removed.", status=404, code="request_not_found"))
#: Of a request that was running when so many servers died.
GIVEN_UP = _refusal(
    RequestError(
        f"The server died {MOST_ATTEMPTS} times while it ran this request.",
        status=500,
        kind="server_error",
        code="request_given_up",
    )
)


class Endings:
    """Ends requests of a server. One object for all of them."""

    def __init__(self, service: Service, store: RequestStore) -> None:
        self._service = service
        self._store = store

    async def finish(self, run: DurableRun, state: State, answer: StoredAnswer, ending: Sequence[Chunk]) -> None:
        """Store the answer of a run with what it has used, publish the chunks of its end and close it; or close it as
        it has ended before. Raises StoreError.
        """
        used = run.used()
        if await self._store.finish(run.id, state, answer, used):
            settle(self._service, used)
            run.publish(ending)
            run.close(answer)
        else:
            await self.close_as_stored(run)

    async def refuse(self, run: DurableRun, state: State, error: RequestError) -> None:
        """End a request that runs here with an error, in its stream if that has begun. Raises StoreError."""
        ending = broken_off(form_of_kind(run.kind), run.published, error)
        stream = joined([*run.published, *ending]) if ending else None
        await self.finish(run, state, _refusal(error, stream), ending)

    async def close_as_stored(self, run: DurableRun) -> None:
        """Close a run that has ended with the answer that the store has, or with an error where it was removed.

        Raises StoreError.
        """
        close_with(run, await self._store.answer(run.id) or _REMOVED)

    async def abort(self, run: DurableRun, request: DurableRequest) -> None:
        """Cancel a request that does not run here any more, or runs on another server, with an error behind all events
        that are written of it. Raises StoreError.
        """
        prepared: Prepared | None = None
        transcript: Transcript | None = None
        while True:
            events = await self._store.events(request.id)
            if prepared is None and (prepared := await self._prepared(request, bool(events))) is not None:
                transcript = Transcript(prepared)
            if prepared is not None and transcript is not None:
                fresh = events[transcript.count :]
                run.publish(transcript.opening)
                run.publish((await self._service.in_worker(partial(transcript.add_events, fresh))).chunks)
                used = usage_of(self._service, prepared)
            else:
                used = usage_of_events(self._service, request, events)
            ending = broken_off(form_of_kind(run.kind), run.published, _ABORTED)
            stream = None if transcript is None or not ending else joined([*run.published, *ending])
            answer = _refusal(_ABORTED, stream)
            if await self._store.abort(request.id, answer, len(events), used):
                settle(self._service, used)
                run.publish(ending)
                run.close(answer)
                return
            if not await self._store.read(partial(requests.unended_of, ids=[request.id])):
                await self.close_as_stored(run)
                return

    async def _prepared(self, request: DurableRequest, begun: bool) -> Prepared | None:
        """Return a request that may have used tokens, or that streams; None for the rest, and for a body that cannot be
        prepared any more.
        """
        try:
            body = await self._service.in_worker(partial(parse, form_of_kind(request.kind).body, request.body or b""))
            if begun or (isinstance(body, GeneratingBody) and body.stream):
                return await prepared_here(self._service, request)
        except ZooError as error:
            _log.warning("request %s ends without its stream and the tokens of its prompt: %s", request.id, error)
        return None


async def prepared_here(service: Service, request: DurableRequest) -> Prepared:
    """Return a stored request as this server words it, whichever runs it. Raises as `prepare_served`."""
    seconds = request.created // 10**9
    receipt = Receipt(request.id, seconds, 0, request.seed, request.model, request.principal)
    return await prepare_served(service, form_of_kind(request.kind).body, request.body or b"", receipt)


def close_with(run: DurableRun, answer: StoredAnswer) -> None:
    """Close a run with an answer that another server has stored, behind what this one has published of it."""
    if answer.stream is not None:
        run.publish(chunks_of(answer.stream))
    elif answer.status != 200:
        error = RequestError.read(answer.status, json.loads(answer.document))
        run.publish(broken_off(form_of_kind(run.kind), run.published, error))
    run.close(answer)
