"""ASGI endpoints of the generating routes.

Each request is read, parsed and tokenized (worker thread), run, and answered as one document or as server-sent events.
If the client disconnects at any point, its sequences are aborted and its places released. An error before the first
token is answered with its HTTP status; a later one in a stream is sent as an error event, and the stream ends. What
runs in the background, or is durable, goes on without its client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, nullcontext
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.frontend.assemble import Receipt
from runtime.frontend.choice import TextPiece
from runtime.frontend.errors import RequestError, unavailable
from runtime.frontend.schemas import ServedBody
from runtime.server.answers.background import BackgroundRun
from runtime.server.answers.forms import AnswerForm, form_of_body, writer_of
from runtime.server.answers.kept import SettledBody
from runtime.server.auth import principal
from runtime.server.context import Service
from runtime.server.durable.answering import answer_durably, is_durable, write_run
from runtime.server.openai.format import FinishedChoice, Wording
from runtime.server.openai.responses import as_request_error, dump, error_reply
from runtime.server.openai.sse import Outlet
from runtime.server.request_body import read_body, while_connected
from runtime.server.request_runner import Prepared, cached_tokens, prepare_served, run
from zoo.errors import ZooError

_log = logging.getLogger("blockzoo.server")


class Generate:
    """The ASGI application of one generating route, by its type of body.

    Attributes:
        body: The model of the request body that the route parses.
        summary: What the route does, for its documents.
    """

    def __init__(self, service: Service, kind: type[ServedBody]) -> None:
        self._service = service
        self._form = form_of_body(kind)
        self.body = kind
        self.summary = self._form.summary

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        durable = self._service.durable
        if durable is not None and is_durable(self._service, request):
            await answer_durably(self._service, durable, self._form, request, send)
            return
        owner, now = principal(request), time.monotonic_ns()
        receipt = Receipt(self._form.prefix + str(request.state.request_id), int(time.time()), now, principal=owner)
        try:
            with self._service.gate.place() as place:
                raw = await read_body(request, self._service.config.max_body_bytes)
                settled = await self._settled(raw, owner)
                if durable is None or not settled.kept:
                    self._service.admit(owner)
                    place.count_request()
                    async with while_connected(receive):
                        with nullcontext() if durable is None else self._service.announced(receipt.id):
                            prepared = await prepare_served(self._service, self.body, settled.raw, receipt)
                            if not settled.background:
                                place.grow(len(prepared.choices))
                        if not settled.background:
                            await self._answer(prepared, scope, receive, send)
            if durable is None and settled.background:
                async with while_connected(receive):
                    await self._answer_apart(prepared, scope, receive, send)
            elif durable is not None and settled.kept:
                await answer_durably(self._service, durable, self._form, request, send, raw, settled)
        except ClientDisconnect:
            return

    async def _answer_apart(self, prepared: Prepared, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin a response that runs whether its client stays or not, and show it: as a stream, or as it is now."""
        if self._service.background is None:
            raise TypeError("responses in the background are durable here")
        response = BackgroundRun(self._form, prepared.generation)
        with ExitStack() as held:
            held.enter_context(self._service.gate.place()).grow(len(prepared.choices))
            answering = partial(self._answer, prepared, scope, receive)
            self._service.background.start(response, answering, lambda: place.close())
            place = held.pop_all()
        if prepared.generation.stream:
            await write_run(self._form, response.run, -1, scope, receive, send)
        else:
            await Response(response.now().document(), media_type="application/json")(scope, receive, send)

    async def _settled(self, raw: bytes, owner: str) -> SettledBody:
        settle, durable = self._form.settle, self._service.durable
        if settle is None:
            return SettledBody(raw, False)
        return await settle(self._service, None if durable is None else durable.store, raw, owner)

    async def _answer(self, prepared: Prepared, scope: Scope, receive: Receive, send: Send) -> None:
        wording = self._form.wording(prepared.generation)
        async with aclosing(run(self._service, prepared)) as steps:
            if prepared.generation.stream:
                await _stream(self._form, prepared, steps, send)
                return
            try:
                response = Response(await self._whole(prepared, wording, steps), media_type="application/json")
                await response(scope, receive, send)
            except asyncio.CancelledError:
                if self._service.gate.closed:
                    await error_reply(_cut_off(), scope["path"])(scope, receive, send)
                raise

    async def _whole(self, prepared: Prepared, wording: Wording, steps: AsyncIterator[list[TextPiece]]) -> bytes:
        finished = [FinishedChoice(choice.index) for choice in prepared.choices]
        async for pieces in steps:
            for piece in pieces:
                finished[piece.choice].add(piece)
        return await self._service.in_worker(lambda: dump(wording.whole(finished)))


async def _stream(form: AnswerForm, prepared: Prepared, steps: AsyncIterator[list[TextPiece]], send: Send) -> None:
    """Write the chunks of a streamed answer.

    The response starts only after the first step, so that an error before it still gets its own status; but at once
    where its client needs the id (`StreamWriter.early`).
    """
    chunks = writer_of(form, prepared.generation)
    first = [] if chunks.early else await anext(aiter(steps))
    opening = chunks.openings((choice.index for choice in prepared.choices), cached_tokens(prepared))
    opening += chunks.write_pieces(first)
    with Outlet(send) as out:
        await out.start()
        await out.write(opening)
        try:
            async for pieces in steps:
                await out.write(chunks.write_pieces(pieces))
            generated = sum(choice.tokens for choice in prepared.choices)
            await out.write(chunks.usage(generated, cached_tokens(prepared)))
        except asyncio.CancelledError:
            await out.write(form.failure(_cut_off(), out.events), more=False)
            raise
        except ClientDisconnect:
            raise
        except Exception as error:
            if not isinstance(error, ZooError):
                _log.exception("a stream broke")
            await out.write(form.failure(as_request_error(error), out.events))
        await out.write(form.end, more=False)


def _cut_off() -> RequestError:
    """Return the 503 for requests that still run when the drain's time is over. A disconnected client ignores it."""
    return unavailable("The server is shutting down.")
