"""Run one durable request: from where its journal ends to its answer in the store.

Every step's events are in the store before their chunks are published, and so is the answer before its end is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import replace
from functools import partial

from runtime.frontend.assemble import Receipt
from runtime.frontend.errors import RequestError
from runtime.queueing.records import DurableRequest, StoredAnswer
from runtime.server.answers.forms import form_of_kind
from runtime.server.context import Service
from runtime.server.durable.charging import usage_of, usage_of_events
from runtime.server.durable.endings import Endings
from runtime.server.durable.run import DurableRun
from runtime.server.durable.store import RequestStore
from runtime.server.durable.transcript import AddedEvents, Chunk, Transcript, joined
from runtime.server.durable.turns import Turns
from runtime.server.interfaces import EventStream
from runtime.server.openai.responses import as_request_error
from runtime.server.request_runner import Meter, Prepared, failure, prepare_served
from runtime.types import SequenceRequest, TokenEvent
from zoo.errors import StoreError, Unavailable, ZooError

#: Held while sequences are scheduled; taken once.
Seat = AbstractAsyncContextManager[None]

_log = logging.getLogger("blockzoo.server")

#: Seconds for which sequences of an earlier run of the request may take to end.
OPEN_SECONDS = 30.0
_PAUSE = 0.02


class _EndedElsewhere(Exception):
    """Another server has ended the request, for a client that came to it, or its batch has stopped."""


class Execution:
    """Runs requests of a server. One object for all of them."""

    def __init__(self, service: Service, store: RequestStore, endings: Endings) -> None:
        self._service = service
        self._store = store
        self._endings = endings
        #: In which order what was taken over is opened, by id of the request; all else is opened as it comes.
        self.turns = Turns()

    async def run_request(
        self,
        run: DurableRun,
        request: DurableRequest,
        prepared: Prepared | None,
        seat: Seat | None = None,
    ) -> None:
        """Produce the answer of a running request, or the error that it ends with; store it, and close the run.

        Args:
            prepared: Its body, if this server has accepted it; None: it may have a journal.
            seat: Held while its sequences are scheduled.

        Raises what is no fault of the request, which stays unfinished then: StoreError, Unavailable, RequestError 503.
        """
        try:
            answer, ending = await self._answer(run, request, prepared, seat)
        except _EndedElsewhere:
            await self._endings.close_as_stored(run)
            return
        except (StoreError, Unavailable):
            raise
        except Exception as error:
            refusal = as_request_error(error)
            if refusal.status == 503 or not self._service.driver.alive:
                raise
            if not isinstance(error, ZooError):
                _log.exception("request %s failed", run.id)
            await self._endings.refuse(run, "failed", refusal)
            return
        await self._endings.finish(run, "done", answer, ending)

    async def _answer(
        self, run: DurableRun, request: DurableRequest, prepared: Prepared | None, seat: Seat | None
    ) -> tuple[StoredAnswer, list[Chunk]]:
        """Return the answer, and the chunks of its end. Raises _EndedElsewhere."""
        past: list[TokenEvent] = []
        stored = prepared is None
        if prepared is None:
            # One that no server has begun has none. Many such lines come at once, and a query each would take the
            # interpreter from the event loop.
            past = await self._store.events(request.id) if request.version else []
            run.used = partial(usage_of_events, self._service, request, past)
            arrival = arrival_of(request, time.monotonic_ns(), time.time_ns())
            seconds = request.created // 10**9
            receipt = Receipt(request.id, seconds, arrival, request.seed, request.model, request.principal)
            prepared = await prepare_served(
                self._service, form_of_kind(request.kind).body, request.body or b"", receipt
            )
            _check_version(request, prepared, bool(past))
        transcript = Transcript(prepared)
        run.used = partial(usage_of, self._service, prepared)
        run.publish(transcript.opening)
        if past:
            run.publish((await self._service.in_worker(partial(transcript.add_events, past))).chunks)
        meter = Meter(self._service.metrics.get_model(prepared.generation.model.name), prepared, resumed=bool(past))
        async with seat or nullcontext(), aclosing(self._steps(request, prepared, transcript, meter)) as steps:
            if stored:  # waiting for the seat is no attempt
                model = prepared.generation.model
                if not await self._store.begin(request, model.name, model.chain):
                    raise _EndedElsewhere
            async for first, added in steps:
                if not await self._store.append(run.id, first, added.events):
                    raise _EndedElsewhere
                run.publish(added.chunks)
        ending = transcript.ending()
        document = await self._service.in_worker(transcript.document)
        stream = joined([*run.published, *ending]) if prepared.generation.stream else None
        return StoredAnswer(200, document, stream), ending

    async def _open(self, sequences: Sequence[SequenceRequest]) -> EventStream:
        """Open sequences, once those of the same names have ended that this server has just put down."""
        end = time.monotonic() + OPEN_SECONDS
        while True:
            try:
                return self._service.driver.open_stream(sequences)
            except ValueError:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(_PAUSE)

    async def _steps(
        self, request: DurableRequest, prepared: Prepared, transcript: Transcript, meter: Meter
    ) -> AsyncGenerator[tuple[int, AddedEvents], None]:
        """Yield what each step adds, with the number of its first event, until every choice has ended."""
        driver, generation = self._service.driver, prepared.generation
        sequences = [
            replace(sequence, output=output, priority=request.priority) for sequence, output in transcript.unfinished()
        ]
        heavy = generation.echo and generation.logprobs is not None
        try:
            if not sequences:
                return
            await self.turns.wait_turn(request.id)
            opened = await self._open(sequences)
            self.turns.end_turn(request.id)
            async with aclosing(opened) as stream:
                async for events in stream:
                    first = transcript.count
                    if heavy:
                        added = await self._service.in_worker(partial(transcript.add_events, events))
                    else:
                        added = transcript.add_events(events)
                    meter.step(added.pieces)
                    if failed := [piece for piece in added.pieces if piece.finish in ("error", "abort")]:
                        raise failure(self._service, failed[0].error)
                    if cut := [prepared.choices[piece.choice].seq for piece in added.pieces if piece.cut]:
                        driver.abort(cut)
                    if added.events:
                        yield first, added
                    if not transcript.unfinished_choices:
                        return
        finally:
            meter.abort_unfinished()


def _check_version(request: DurableRequest, prepared: Prepared, begun: bool) -> None:
    """Raise RequestError 409 if another model than the present one has produced tokens of a request."""
    model = prepared.generation.model
    if begun and (request.version, request.model) != (model.chain, model.name):
        message = f"The model {request.model} has changed since this answer was begun."
        raise RequestError(message, status=409, param="model", code="model_changed")


def arrival_of(request: DurableRequest, monotonic: int, wall: int) -> int:
    """Return a stored request's arrival in ns of the monotonic clock, which began anew with the server.

    Its deadline (`slo_ms`) counts from there. A line of a batch arrives when its turn comes.
    """
    return monotonic if request.batch is not None else monotonic - max(wall - request.created, 0)
