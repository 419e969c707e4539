"""Answer HTTP requests that are durable: a connection follows a run, and its end does not end the run."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from blake3 import blake3
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.frontend.errors import RequestError, unavailable
from runtime.queueing.records import DurableRequest
from runtime.server.answers.forms import AnswerForm
from runtime.server.answers.kept import SettledBody, find_kept
from runtime.server.auth import principal
from runtime.server.context import Service
from runtime.server.durable.run import DurableRun
from runtime.server.durable.runs import DurableRuns
from runtime.server.durable.transcript import EVENT_END, behind
from runtime.server.openai.responses import as_request_error
from runtime.server.openai.sse import Outlet
from runtime.server.request_body import read_body, while_connected

_log = logging.getLogger("blockzoo.server")

_KEY, _LAST = "idempotency-key", "last-event-id"
_MOST_KEY = 255
_MOST_DIGITS = 18


def is_durable(service: Service, request: Request) -> bool:
    """Return whether a generating request outlives the server: by its key, or since all do."""
    return service.durable is not None and (service.config.durable == "all" or _KEY in request.headers)


async def answer_durably(
    service: Service,
    durable: DurableRuns,
    form: AnswerForm,
    request: Request,
    send: Send,
    raw: bytes | None = None,
    settled: SettledBody | None = None,
) -> None:
    """Accept a generating request, or find the equal one of its key, and answer with what it publishes.

    Args:
        raw: The request's body, where it has been read.
        settled: What it becomes, where that is known (`AnswerForm.settle`).

    Raises RequestError: 400 for a bad header or body, 422 for another body under the same key, 503.
    """
    owner, number = principal(request), last_event(request)
    given = request.headers.get(_KEY)
    key = None if given is None else _key_digest(owner, given)
    try:
        # The limit on sequences (`Gate.place`) does not hold here: what is accepted may wait in the store.
        if service.gate.closed:
            raise unavailable("The server is shutting down.")
        if raw is None:
            raw = await read_body(request, service.config.max_body_bytes)
        name = form.prefix + (key or str(request.state.request_id))
        run = await durable.accept(form, raw, name, owner, key, settled)
        async with while_connected(request.receive):
            if form.at_once is not None and await form.at_once(service, raw):
                await (await _begun(service, durable, run, owner))(request.scope, request.receive, send)
            else:
                await write_run(form, run, number, request.scope, request.receive, send)
    except ClientDisconnect:
        return


async def _begun(service: Service, durable: DurableRuns, run: DurableRun, owner: str) -> Response:
    """Return a response as it is once it is kept. Raises what has kept it from being stored."""
    await run.stored.wait()
    if run.error is not None:
        raise run.error
    found = await find_kept(service, durable.store, run.id, owner)
    if found is None:
        raise RequestError("The response was removed.", status=404, code="response_not_found")
    return Response(found.document(), media_type="application/json")


async def run_to_follow(durable: DurableRuns, found: DurableRequest) -> DurableRun:
    """Return the run of a request: the one here, one that has its answer, or else one that follows or resumes it.

    Raises RequestError for a line of a batch that does not run here and has not ended; StoreError.
    """
    if (here := durable.find(found.id)) is not None:
        return here
    answer = await durable.store.answer(found.id)
    if answer is None and found.batch is None and not durable.parking:
        return durable.find(found.id) or durable.start(replace(found, state="queued", body=None))
    if answer is None:
        raise RequestError("The request does not run now.", status=409, code="request_not_running")
    run = DurableRun(found.id, found.kind, found.principal, found.digest)
    run.close(answer)
    return run


async def write_run(
    form: AnswerForm, run: DurableRun, number: int, scope: Scope, receive: Receive, send: Send, skipped: int = 0
) -> None:
    """Write what a run publishes behind the events of `number` if it streams, else its answer once there is one.

    `skipped`: of these events so many are left out.
    """
    async with aclosing(_events(run, number)) as found, aclosing(_behind(found, skipped)) as events:
        first = await anext(events, None)
        if first is None:
            await _write_answer(form, run, scope, receive, send)
            return
        with Outlet(send) as out:
            await out.start()
            await out.write(first)
            try:
                async for data in events:
                    await out.write(data)
            except ClientDisconnect:
                raise
            except Exception as error:  # the request was put down: the stream is not at its end
                await out.write(form.failure(as_request_error(error), skipped + out.events), more=False)
                return
            await out.write(b"", more=False)


async def _events(run: DurableRun, number: int) -> AsyncGenerator[bytes, None]:
    """Yield what a run's stream has behind `number`, at least b"" once; nothing for a run that does not stream."""
    if run.answer is not None and not run.published:  # an answer from the store
        if run.answer.stream is not None:
            yield behind(run.answer.stream, number)
        return
    streams = False
    async for data in run.follow(number):
        streams = True
        yield data
    if not streams and run.published:
        yield b""


async def _behind(events: AsyncIterator[bytes], count: int) -> AsyncGenerator[bytes, None]:
    """Yield a stream without its first events; b"" for what had only such."""
    async for data in events:
        if not count:
            yield data
            continue
        each = data.split(EVENT_END)
        left_out = min(count, len(each) - 1)
        count -= left_out
        yield EVENT_END.join(each[left_out:])


async def _write_answer(form: AnswerForm, run: DurableRun, scope: Scope, receive: Receive, send: Send) -> None:
    """Write the answer of a run that is over as one document. Raises its error where the server has put it down."""
    answer = await run.answered()
    if answer is None:
        raise run.error or unavailable("The request was put down.")
    document = answer.document
    if answer.status != 200 and form.reworded is not None:
        document = form.reworded(answer.status, document)
    await Response(document, answer.status, media_type="application/json")(scope, receive, send)


def last_event(request: Request) -> int:
    """Return the number in `Last-Event-ID`, -1 without one. Raises RequestError for what is no number of an event."""
    given = request.headers.get(_LAST, "")
    if not given:
        return -1
    if not (given.isascii() and given.isdigit() and len(given) <= _MOST_DIGITS):
        raise RequestError("Last-Event-ID is not the id of an event of this server.", param="Last-Event-ID")
    return int(given)


def _key_digest(principal: str, key: str) -> str:
    """Return the digest by which a key of a principal is known. Raises RequestError."""
    if not 0 < len(key) <= _MOST_KEY or not (key.isascii() and key.isprintable()):
        raise RequestError(
            f"An Idempotency-Key has 1 to {_MOST_KEY} printable ASCII characters.", param="Idempotency-Key"
        )
    return blake3(f"{principal}\0{key}".encode()).hexdigest(16)
