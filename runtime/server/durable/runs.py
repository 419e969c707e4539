"""The durable requests of one server: accepted once each, run apart from connections, taken up again after a restart.

    accept -> put (disk) -> run: events of the driver -> journal -> published chunks -> finish (disk) -> answer
    start of a server: take over -> claim -> replay the journalled events -> open the sequences with their tokens -> run

Several servers may have one queue: a request that another one runs is followed here (`following`). Nothing is
published before it is in the store, so what a client has seen is never taken back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from blake3 import blake3

from runtime.frontend.assemble import Receipt
from runtime.frontend.errors import overloaded, unavailable
from runtime.queueing import requests
from runtime.queueing.broker import INTERACTIVE, RabbitIntake
from runtime.queueing.database import QueueDatabase
from runtime.queueing.records import ENDED, DurableRequest
from runtime.queueing.requests import MOST_ATTEMPTS
from runtime.server.answers.forms import AnswerForm
from runtime.server.answers.kept import SettledBody
from runtime.server.context import Service
from runtime.server.durable.endings import GIVEN_UP, Endings
from runtime.server.durable.execution import Execution, Seat
from runtime.server.durable.following import LOOK, Follower
from runtime.server.durable.run import DurableRun, key_reused, matching_run, unknown_request
from runtime.server.durable.store import RequestStore
from runtime.server.durable.transcript import Chunk, Transcript
from runtime.server.request_runner import Prepared, prepare_served
from zoo.errors import StoreError, ZooError

_log = logging.getLogger("blockzoo.server")

#: Seconds between two looks for answers that are older than the retention time.
EXPIRY_PAUSE = 600.0
#: Seconds until a request is tried again that the store failed on.
RETRY_SECONDS = 5.0
#: Answers that one transaction removes at most.
_EXPIRED_AT_ONCE = 1000
#: Requests that are claimed in one transaction at most.
_CLAIMED_AT_ONCE = 32

Work = Callable[[DurableRun], Coroutine[Any, Any, None]]


class DurableRuns:
    """All durable requests of a server. `open` before the first, `park` and `close` at the end, on one event loop.

    Attributes:
        store: The requests at rest.
        parking: The server is shutting down; unfinished requests wait for the next one.
    """

    def __init__(self, service: Service, database: QueueDatabase) -> None:
        self.store = RequestStore(database)
        self.parking = False
        self._service = service
        self._endings = Endings(service, self.store)
        self._execution = Execution(service, self.store, self._endings)
        self._follower = Follower(service, self.store, self._endings)
        self._runs: dict[str, DurableRun] = {}
        self._places = asyncio.Semaphore(service.config.max_queued)
        self._suspect = asyncio.Lock()
        self._expiry: asyncio.Task[None] | None = None
        #: Where requests wait, None for the tables.
        self._broker: RabbitIntake | None = None
        self._consumer: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Take up what servers before have left."""
        self.store.open()
        await self.take_over()
        config = self._service.config
        if config.broker is not None:
            self._broker = RabbitIntake(config.broker, INTERACTIVE, self.store.journal, 2 * config.max_num_seqs)
            await self._broker.open()
            self._consumer = asyncio.create_task(self._consume(self._broker))
        self._expiry = asyncio.create_task(self._expire())

    async def take_over(self) -> None:
        """Start what servers have left that died or stopped, but for lines of batches. Raises StoreError."""
        taken = await self.store.take_over(GIVEN_UP)
        for dead in taken.given_up:
            _log.error("request %s was running when %d servers died, and is given up", dead, MOST_ATTEMPTS)
        mine = [request for request in taken.requests if request.id not in self._runs]  # else a run follows it
        self._execution.turns.enter(request.id for request in mine)
        for request in mine:
            self.start(request)

    async def drop_ended(self) -> None:
        """Stop requests that were ended elsewhere: aborted or removed by a client that came to another server."""
        here = (run for run in self._runs.values() if run.task is not None and not run.elsewhere)
        mine = {run.id: run for run in here if run.stored.is_set()}
        going = await self.store.read(partial(requests.unended_of, ids=list(mine))) if mine else set()
        for name in mine.keys() - going:
            run = mine[name]
            await self._endings.close_as_stored(run)
            if run.task is not None:
                run.task.cancel()

    async def park(self) -> None:
        """Put all requests down for the next server: abort their sequences, and queue them again. Call it once."""
        self.parking = True
        for task in (self._expiry, self._consumer):
            if task is not None:
                task.cancel()
        await self.put_down()
        await self.store.release()
        if self._broker is not None:
            await self._broker.close()

    async def put_down(self) -> None:
        """Abort the sequences of all requests; they stay in the store as they are."""
        runs = list(self._runs.values())
        for run in runs:
            run.close(None, unavailable("The server is shutting down. It keeps the request for the next one."))
            if run.task is not None:
                run.task.cancel()
        await asyncio.gather(*(run.task for run in runs if run.task is not None), return_exceptions=True)

    async def close(self) -> None:
        """Write what waits, and end the journal."""
        if self._broker is not None:
            await self._broker.close()
        await self.store.close()

    @property
    def interactive(self) -> bool:
        """Whether requests wait or run here that are no lines of batches. From any thread."""
        return any(run.task is not None and not run.elsewhere for run in tuple(self._runs.values()))

    def find(self, request: str) -> DurableRun | None:
        """Return a request that waits or runs here."""
        return self._runs.get(request)

    async def accept(
        self,
        form: AnswerForm,
        raw: bytes,
        request: str,
        principal: str,
        key: str | None,
        settled: SettledBody | None = None,
    ) -> DurableRun:
        """Return the run of a request: of an equal one with the same id, or a new one.

        A request that has ended comes as a run that has its answer. A new one publishes nothing before it is in the
        store; if it cannot be stored, its run closes with the reason.

        Args:
            request: Its id, derived from principal and key where it has a key.
            key: Digest of its key.
            settled: What the body becomes, where that is known.

        Raises:
            RequestError: 422 where another body came with this key; what is wrong with the body; 429; 503.
            StoreError: The store cannot be read.
        """
        digest = blake3(form.kind.encode() + b"\0" + raw).digest()
        if (known := await self._known(request, principal, key, digest)) is not None:
            return known
        self._service.admit(principal)
        created, seed, now = time.time_ns(), secrets.randbelow(2**62), time.monotonic_ns()
        receipt = Receipt(request, created // 10**9, now, seed, principal=principal)
        if form.settle is not None:
            settled = settled or await form.settle(self._service, self.store, raw, principal)
            raw = settled.raw
        with self._service.announced(request):
            prepared = await prepare_served(self._service, form.body, raw, receipt)
            if (known := matching_run(self._runs.get(request), digest)) is not None:  # the same one has come meanwhile
                return known
            if self.parking:
                raise unavailable("The server is shutting down.")
            most = self._service.config.max_queued
            if settled is not None and settled.background and len(self._runs) >= most:  # no connection bounds those
                raise overloaded(f"The server is full: {len(self._runs)} requests wait or run. Try again later.")
        waits = self._places.locked() or self._broker is not None
        if waits:
            self._service.driver.expect_request(request, comes=False)
        stored = DurableRequest(
            id=request,
            kind=form.kind,
            digest=digest,
            seed=receipt.seed or 0,
            created=created,
            principal=principal,
            key=key,
            body=raw,
            priority=prepared.generation.sequences[0].priority,
            model=prepared.generation.model.name,
            version=prepared.generation.model.chain,
            owner=self.store.database.server,
            state="queued" if waits else "running",
            attempts=0 if waits else 1,
        )
        opening = Transcript(prepared).opening if settled is not None and settled.background else []
        return self._launch(stored, lambda run: self._begin(run, stored, None if waits else prepared, opening))

    def start(self, request: DurableRequest, raw: bytes | None = None) -> DurableRun:
        """Run a stored request. A queued one is claimed once its turn comes.

        Args:
            raw: The body; None: it is read from the store then.
        """
        body = request if raw is None else replace(request, body=raw)
        return self._launch(request, lambda run: self._resume(run, body))

    async def run(self, request: DurableRequest, raw: bytes, seat: Seat) -> None:
        """Run a claimed line of a batch to its end in the store, in the caller's task; hold `seat` while it runs.

        Cancelled, it aborts its sequences and leaves the request running in the store. Raises StoreError, also once
        the engine is gone.
        """
        run = self._runs[request.id] = DurableRun(request.id, request.kind, request.principal, request.digest)
        try:
            await self._execution.run_request(run, replace(request, body=raw), None, seat)
        except StoreError:
            raise
        except ZooError as error:
            raise StoreError(str(error)) from error
        finally:
            self._unregister(run)
            run.close(None, unavailable("The line was put down."))

    async def cancel(self, request: DurableRequest) -> None:
        """Abort a request: unless it has ended, it ends with an error. Raises StoreError."""
        run = self._runs.get(request.id) or DurableRun(request.id, request.kind, request.principal, request.digest)
        if run.task is not None:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
        await self._endings.abort(run, request)

    # -- accepting -----------------------------------------------------------------------------------------------------

    async def _known(self, request: str, principal: str, key: str | None, digest: bytes) -> DurableRun | None:
        """Return the run of an id that is known, started if this server had put it down; None for a new one."""
        if (run := matching_run(self._runs.get(request), digest)) is not None:
            return run
        if key is None:  # its id is new
            return None
        stored = await self.store.read(partial(requests.by_key, principal=principal, key=key))
        if stored is None:
            return None
        answer = await self.store.answer(stored.id) if stored.state in ENDED else None
        run = self._runs.get(stored.id)  # it may have been started meanwhile
        if run is None and answer is None:
            run = self.start(replace(stored, state="queued", body=None))
        elif run is None:
            run = DurableRun(stored.id, stored.kind, stored.principal, stored.digest)
            run.close(answer)
        return matching_run(run, digest)

    # -- running -------------------------------------------------------------------------------------------------------

    def _launch(self, request: DurableRequest, work: Work) -> DurableRun:
        run = self._runs[request.id] = DurableRun(request.id, request.kind, request.principal, request.digest)
        run.task = asyncio.create_task(self._guarded(run, request, work(run)))
        return run

    async def _guarded(self, run: DurableRun, request: DurableRequest, work: Coroutine[Any, Any, None]) -> None:
        """Await the work of a run. What is no fault of the request puts it down: it stays in the store, unfinished."""
        try:
            await work
        except Exception as error:
            expected = isinstance(error, ZooError)
            _log.error("request %s was put down: %s", run.id, error, exc_info=not expected)
            run.close(None, unavailable(str(error)) if isinstance(error, StoreError) or not expected else error)
            if self._service.driver.alive:
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self._start_again, request)
        finally:
            self._unregister(run)

    def _start_again(self, request: DurableRequest) -> None:
        """Start a request that was put down, unless it runs again or the server is shutting down."""
        if not self.parking and request.id not in self._runs:
            self.start(replace(request, state="queued", body=None))

    def _unregister(self, run: DurableRun) -> None:
        self._execution.turns.end_turn(run.id)
        if self._runs.get(run.id) is run:
            del self._runs[run.id]

    async def _begin(
        self, run: DurableRun, request: DurableRequest, prepared: Prepared | None, opening: Sequence[Chunk]
    ) -> None:
        """Store a new request, and run it.

        Args:
            prepared: Its body; None: it waits for a place without it.
            opening: What is published of it at once.
        """
        if self._broker is not None:
            await self._broker.put([replace(request, owner=None)])
            await self._arrival(run)
            fresh = await self._is_mine(request)
        else:
            fresh = await self.store.put(request)
        if not fresh:  # another server was sent the same one, or it has ended meanwhile
            stored = await self.store.read(partial(requests.get, request=run.id))
            if stored is not None and stored.digest != request.digest:
                run.close(None, key_reused())
            else:
                await self._resume(run, replace(request, state="queued", body=None))
            return
        run.stored.set()
        run.publish(opening)
        if prepared is None:
            await self._resume(run, replace(request, body=None))
        else:
            async with self._places:
                await self._execution.run_request(run, request, prepared)

    async def _resume(self, run: DurableRun, request: DurableRequest) -> None:
        """Claim a stored request once there is a place, and run it; follow it while another server has it."""
        run.stored.set()
        while True:
            async with self._places, self._alone(request):
                claimed = await self.store.claim(request)
                if claimed is not None:
                    await self._execution.run_request(run, claimed, None)
                    return
            if (answer := await self.store.answer(run.id)) is not None:
                run.close(answer)
            self._execution.turns.end_turn(run.id)
            if answer is not None or await self._follower.follow(run, run.id):
                return
            if await self.store.read(partial(requests.get, request=run.id)) is None:  # expired, or never stored
                run.close(None, unknown_request())
                return

    async def _is_mine(self, request: DurableRequest) -> bool:
        """Return whether the store has this very request, not one of the same id."""
        stored = await self.store.read(partial(requests.get, request=request.id))
        return stored is not None and stored.seed == request.seed

    async def _arrival(self, run: DurableRun) -> None:
        """Wait until the broker has given a request to a server, which has put it into the store."""
        while await self.store.read(partial(requests.get, request=run.id)) is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK):
                    await run.delivered.wait()

    async def _consume(self, broker: RabbitIntake) -> None:
        """Run what the broker gives, and acknowledge it once it has its answer."""
        settling: set[asyncio.Task[None]] = set()
        while True:
            try:
                claimed = await broker.claim(_CLAIMED_AT_ONCE)
            except StoreError as error:
                _log.error("the broker's requests: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            for request in claimed:
                run = self._runs.get(request.id) or self.start(replace(request, state="queued", body=None))
                run.delivered.set()
                task = asyncio.create_task(self._settle(broker, run))
                settling.add(task)
                task.add_done_callback(settling.discard)

    async def _settle(self, broker: RabbitIntake, run: DurableRun) -> None:
        """Acknowledge a request once it has its answer, or give it back; in the end one of both, whatever fails."""
        while await run.answered() is None:
            try:
                again = self._runs.get(run.id, run)
                if again is run:
                    await broker.release([run.id])
                    return
                run = again  # started again here: to give it back now would let it run twice
            except StoreError as error:
                _log.warning("request %s could not be put down: %s", run.id, error)
                if self.parking:
                    return
                await asyncio.sleep(RETRY_SECONDS)
        await broker.ack(run.id)

    @asynccontextmanager
    async def _alone(self, request: DurableRequest) -> AsyncIterator[None]:
        """Let no two requests run at once that all but the last allowed server died with: one may be the cause."""
        if request.attempts < MOST_ATTEMPTS - 1:
            yield
            return
        self._execution.turns.end_turn(request.id)
        async with self._suspect:
            yield

    async def _expire(self) -> None:
        """Remove old answers, now and then."""
        while True:
            before = time.time_ns() - int(self._service.config.retention_hours * 3600 * 10**9)
            remove = partial(requests.expire, before=before, limit=_EXPIRED_AT_ONCE)
            try:
                while await self.store.journal.write(remove) == _EXPIRED_AT_ONCE:
                    pass
            except StoreError as error:
                _log.warning("old answers could not be removed: %s", error)
            await asyncio.sleep(EXPIRY_PAUSE)
