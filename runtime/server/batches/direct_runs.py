"""Run a line through the server's own request runner, and end it in the store with its answer."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from functools import partial

from sqlalchemy import Connection

from runtime.frontend.assemble import Receipt
from runtime.frontend.errors import RequestError
from runtime.frontend.schemas import ChatBody, CompletionBody
from runtime.frontend.served_models import NotServedYet
from runtime.queueing import requests
from runtime.queueing.journal import Journal
from runtime.queueing.records import DurableRequest, State, StoredAnswer
from runtime.server.context import Service
from runtime.server.model_loading import ensure_served
from runtime.server.openai.format import FinishedChoice, wording_for
from runtime.server.openai.responses import as_request_error, dump
from runtime.server.request_runner import Prepared, prepare, run
from zoo.errors import StoreError, ZooError

_log = logging.getLogger("blockzoo.batches")


_GIVEN_UP = RequestError("Servers died while this request ran.", status=500, kind="server_error", code="dead_letter")


def recover_lines(connection: Connection) -> list[str]:
    """Queue again what a server left running when it died (`requests.recover`)."""
    return requests.recover(connection, StoredAnswer(500, dump(_GIVEN_UP.body())), time.time_ns())


class DirectRuns:
    """Runs lines from their beginning."""

    def __init__(self, service: Service, journal: Journal) -> None:
        self._service = service
        self._journal = journal

    async def run(self, request: DurableRequest, raw: bytes, seat: asyncio.Semaphore) -> None:
        """Run a line and end it in the store. Raises StoreError if that cannot be written."""
        try:
            prepared = await self._prepare(request, raw)
            async with seat:
                answer = StoredAnswer(200, await self._answer(prepared))
        except StoreError:
            raise
        except Exception as error:
            if not isinstance(error, ZooError):
                _log.exception("a line of a batch failed")
            failure: RequestError = as_request_error(error)
            answer = StoredAnswer(failure.status, dump(failure.body()))
        state: State = "done" if answer.status < 400 else "failed"
        now = time.time_ns()
        await self._journal.write(partial(requests.finish, request=request.id, state=state, given=answer, now=now))

    async def _prepare(self, request: DurableRequest, raw: bytes) -> Prepared:
        kind = ChatBody if request.kind == "chat" else CompletionBody
        receipt = Receipt(request.id, request.created // 1_000_000_000, time.monotonic_ns())
        while True:
            try:
                return await self._service.in_worker(lambda: prepare(self._service, kind, raw, receipt))
            except NotServedYet as unserved:
                await ensure_served(self._service, unserved.model.name)

    async def _answer(self, prepared: Prepared) -> bytes:
        finished = [FinishedChoice(choice.index) for choice in prepared.choices]
        async with aclosing(run(self._service, prepared)) as steps:
            async for pieces in steps:
                for piece in pieces:
                    finished[piece.choice].add(piece)
        wording = wording_for(prepared.generation)
        return await self._service.in_worker(lambda: dump(wording.whole(finished)))
