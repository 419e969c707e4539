"""Responses that run in the background on a server without a queue: kept in memory, and gone with the server.

One is answered as if its client stayed: what the client would be sent is kept and published, so that a stream can be
followed and taken up again. With a queue such responses are durable requests, and nothing of this is used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.types import Message, Send

from runtime.frontend.apis.responses import ResponseBody
from runtime.frontend.assemble import Generation
from runtime.frontend.errors import RequestError, overloaded
from runtime.queueing.records import State, StoredAnswer
from runtime.server.answers.kept import KeptResponse
from runtime.server.durable.run import DurableRun
from runtime.server.durable.transcript import EVENT_END, Chunk
from runtime.server.openai.responses import as_request_error, dump
from zoo.errors import ZooError

if TYPE_CHECKING:
    from runtime.server.answers.forms import AnswerForm

_log = logging.getLogger("blockzoo.server")

#: Responses of one server, and bytes of those together that have ended; the oldest ones that have ended give way.
MOST_KEPT = 1024
MOST_BYTES = 256 << 20
_DATA = b"data: "

#: Writes an answer to whatever takes it.
Answering = Callable[[Send], Awaitable[None]]


class BackgroundRun:
    """One response. Belongs to the event loop that it is made on.

    Attributes:
        run: What is published of it; it has the answer once that is there.
        task: The task that runs it.
        size: Bytes that are kept of it.
        ended: When it has ended, in seconds of a monotonic clock.
    """

    def __init__(self, form: AnswerForm, generation: Generation) -> None:
        receipt = generation.receipt
        self.run = DurableRun(receipt.id, form.kind, receipt.principal, b"")
        self.task: asyncio.Task[None] | None = None
        self.size = 0
        self.ended: float | None = None
        self._form, self._generation = form, generation
        self._state: State = "running"
        self._parts: list[bytes] = []
        self._events = 0

    def now(self) -> KeptResponse:
        """Return the response as it is now."""
        receipt, model, body = self._generation.receipt, self._generation.model, self._generation.asked
        if not isinstance(body, ResponseBody):
            raise TypeError(type(body).__name__)
        return KeptResponse(self.run.id, body, receipt.created, model.asked or model.name, self._state, self.run.answer)

    async def run_to_end(self, answering: Answering) -> None:
        """Let the answer be written here; it ends with it, or with the error that it fails with."""
        try:
            await answering(self._accept_message)
            self._finish()
        except Exception as error:
            if not isinstance(error, ZooError):
                _log.exception("response %s failed", self.run.id)
            self.refuse("failed", as_request_error(error))

    def refuse(self, state: State, error: RequestError) -> None:
        """End with an error, in its stream if that has begun; does nothing if it has ended."""
        if self.ended is None:
            if self._events:
                self._publish(self._form.failure(error, self._events))
            self._end(state, StoredAnswer(error.status, dump(error.body())))

    async def cancel(self) -> None:
        """Stop it, unless it has ended."""
        self.refuse("cancelled", RequestError("The request was aborted.", status=409, code="request_aborted"))
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def _accept_message(self, message: Message) -> None:
        data = message.get("body", b"")
        if data and self.ended is None:
            if self._generation.stream:
                self._publish(data)
                self._parts.clear()  # the last one has the whole answer
            self._parts.append(data)

    def _publish(self, data: bytes) -> None:
        self.size += len(data)
        self.run.publish([Chunk(self._events, data)])
        self._events += data.count(EVENT_END)

    def _finish(self) -> None:
        if self.ended is not None:
            return
        if not self._generation.stream:
            self._end("done", StoredAnswer(200, b"".join(self._parts)))
            return
        last = json.loads(self._parts[-1].removesuffix(EVENT_END).split(EVENT_END)[-1].split(_DATA, 1)[1])
        if last["type"] == "error":
            error = {"code": last["code"], "message": last["message"]}
            self._end("failed", StoredAnswer(500, dump({"error": error})))
        else:
            self._end("done", StoredAnswer(200, dump(last["response"])))

    def _end(self, state: State, answer: StoredAnswer) -> None:
        self._state, self.ended = state, time.monotonic()
        self._parts.clear()
        self.size += len(answer.document)
        self.run.close(answer)


class BackgroundRuns:
    """All such responses of a server, the oldest first. Belongs to its event loop.

    Args:
        seconds: Time for which one is kept after its end.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._kept: dict[str, BackgroundRun] = {}

    def start(self, response: BackgroundRun, answering: Answering, over: Callable[[], None]) -> None:
        """Begin to run one; `over` is called once it runs no more. Raises RequestError 429 if too many run."""
        self._drop_old(MOST_KEPT - 1)
        if len(self._kept) >= MOST_KEPT:
            raise overloaded(f"The server is full: {len(self._kept)} responses run in the background.")
        self._kept[response.run.id] = response
        response.task = asyncio.create_task(response.run_to_end(answering))

        def ended(_: object) -> None:
            over()
            self._drop_old(MOST_KEPT)

        response.task.add_done_callback(ended)

    def find(self, name: str, principal: str) -> BackgroundRun | None:
        """Return the response of an id, if it is the principal's."""
        self._drop_old(MOST_KEPT)
        found = self._kept.get(name)
        return found if found is not None and found.run.principal == principal else None

    async def remove(self, response: BackgroundRun) -> None:
        """Stop one unless it has ended, and remove it."""
        self._kept.pop(response.run.id, None)
        await response.cancel()

    async def close(self) -> None:
        """Stop all."""
        for response in list(self._kept.values()):
            await self.remove(response)

    def _drop_old(self, most: int) -> None:
        """Remove responses that have ended: those of long ago, and the oldest ones until no bound is exceeded."""
        before = time.monotonic() - self._seconds
        ended = [response for response in self._kept.values() if response.ended is not None]
        size = sum(response.size for response in ended)
        for response in ended:
            if len(self._kept) > most or size > MOST_BYTES or (response.ended or 0.0) < before:
                size -= response.size
                del self._kept[response.run.id]
