"""RabbitMQ in front of the queue's tables (QL-02): requests wait in a quorum queue, and come to a server that has room.

A message is a whole request; a line of a batch is one without its body, a range of the batch's file. A server writes
the rows of what it is given, and so claims it; the message stays unacknowledged until the answer is in the tables.
Duplicates (a redelivery after a broken connection or a consumer time-out, a client that sent again) meet the row of the
first: they are held until that has ended, and taken up if its server dies. So ids count once, whatever comes how often.

RabbitMQ counts how often a message was returned, whatever the reason, and drops it at `DELIVERIES`. That is for what
kills servers before it has a row: afterwards the tables count (`requests.recover`). So a message that has its row, or
that a server puts down in order, is replaced by a copy, which counts from none, once it has come half as often.

Messages are trusted as the tables are: a publisher may ask in the name of any principal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Connection

from runtime.queueing import batches, requests
from runtime.queueing.journal import Journal
from runtime.queueing.records import DurableRequest
from zoo.errors import InputError, StoreError

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage

_log = logging.getLogger(__name__)

#: Names of the queues: of single requests, of lines of batches, and of what was delivered too often or is no request.
INTERACTIVE, LINES, DEAD = "blockzoo.requests", "blockzoo.lines", "blockzoo.dead"
#: Returns of a message until it goes to the dead letters; and those after which a copy may take its place.
DELIVERIES, RENEWED = 20, 10
#: Seconds: for a connection, for a message to be confirmed, between two connections, and between two looks at what is
#: held because another server runs it.
_CONNECT, _CONFIRM, _AGAIN, _REVIEW = 10.0, 10.0, 0.5, 1.0
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(DurableRequest)


@dataclass(slots=True)
class _Link:
    """One connection: its channels go with it, and so do the deliveries that came by them."""

    connection: AbstractConnection
    publishing: AbstractChannel
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class RabbitIntake:
    """An `Intake` over RabbitMQ. Belongs to one event loop, between `open` and `close`.

    Args:
        name: The queue.
        prefetch: Messages that this server holds at most, unacknowledged.
    """

    def __init__(self, url: str, name: str, journal: Journal, prefetch: int) -> None:
        self._url = url
        self._name = name
        self._journal = journal
        self._prefetch = prefetch
        self._link: _Link | None = None
        self._linked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._came: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        #: Messages by request: those that run here, and those that another server runs, or that came twice.
        self._running: dict[str, AbstractIncomingMessage] = {}
        self._held: dict[str, tuple[DurableRequest, list[AbstractIncomingMessage]]] = {}
        #: When what is held is looked at again, in the loop's seconds: also while messages keep coming.
        self._review_at = 0.0

    async def open(self) -> None:
        """Connect. Raises StoreError if that does not succeed in time, InputError without the package."""
        try:
            import aio_pika  # noqa: F401
        except ImportError:
            raise InputError('a broker needs the package aio-pika: pip install "blockzoo[broker]"') from None
        self._task = asyncio.create_task(self._stay_connected())
        await self._connected(_CONNECT)

    async def close(self) -> None:
        """Disconnect: what is not acknowledged comes to other servers."""
        unclaimed = [message for _, several in self._held.values() for message in several]
        while not self._came.empty():
            unclaimed.append(self._came.get_nowait())
        await asyncio.gather(*(self._renew(message) for message in unclaimed))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def put(self, given: Sequence[DurableRequest]) -> None:
        link = await self._connected(_CONFIRM)
        bodies = [(each.id, _encoder.encode(each)) for each in given]
        try:
            async with asyncio.timeout(_CONFIRM):
                await asyncio.gather(*(self._publish(link, name, body) for name, body in bodies))
        except Exception as error:
            raise StoreError(f"the broker has not taken a request: {type(error).__name__}") from error

    async def claim(self, most: int) -> list[DurableRequest]:
        """As `Intake.claim`; waits until there is one."""
        loop = asyncio.get_running_loop()
        while True:
            came = await self._deliveries(most)
            if not came or loop.time() >= self._review_at:
                came += self._take_held()
                self._review_at = loop.time() + _REVIEW
            if came and (claimed := await self._claim_came(came)):
                return claimed

    async def ack(self, request: str) -> None:
        if (message := self._running.pop(request, None)) is not None:
            await _acknowledge(message)

    async def release(self, ids: Collection[str]) -> None:
        owner = self._journal.database.server
        await self._journal.write(partial(requests.release, owner=owner, ids=ids))
        for request in ids:
            if (message := self._running.pop(request, None)) is not None:
                with suppress(Exception):  # a closed channel has given it back already
                    if not await self._renew(message):
                        await message.nack(requeue=True)

    async def _publish(self, link: _Link, request: str, body: bytes) -> None:
        """Return once the broker has a message."""
        from aio_pika import DeliveryMode, Message

        message = Message(body, delivery_mode=DeliveryMode.PERSISTENT, message_id=request)
        await link.publishing.default_exchange.publish(message, self._name)

    # -- deliveries ----------------------------------------------------------------------------------------------------

    async def _deliveries(self, most: int) -> list[tuple[DurableRequest, AbstractIncomingMessage]]:
        """Return what has come, at most so many; none after a while without any, so that what is held is looked at."""
        try:
            async with asyncio.timeout(
                _REVIEW
            ):  # not `wait_for`: with Python 3.11 a message that comes hides a cancellation
                messages = [await self._came.get()]
        except TimeoutError:
            return []
        while len(messages) < most and not self._came.empty():
            messages.append(self._came.get_nowait())
        found = []
        for message in messages:
            try:
                decoded = _decoder.decode(message.body)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                _log.error("a message of %s is no request: %s", self._name, error)
                with suppress(Exception):
                    await message.reject(requeue=False)  # to the dead letters
                continue
            fresh = replace(decoded, state="queued", attempts=0, owner=None, ended=None, status=None)
            found.append((fresh, message))
        return found

    async def _claim_came(self, came: Sequence[tuple[DurableRequest, AbstractIncomingMessage]]) -> list[DurableRequest]:
        """Claim what has come; acknowledge what has ended, and hold what other servers have.

        Raises StoreError; all that came is held then, and so claimed later.
        """
        owner = self._journal.database.server
        given = {request.id: request for request, _ in came}

        def work(connection: Connection) -> tuple[list[DurableRequest], set[str]]:
            live = batches.running(connection, {each.batch for each in given.values() if each.batch is not None})
            over = {each.id for each in given.values() if each.batch is not None and each.batch not in live}
            requests.put(connection, [each for each in given.values() if each.id not in over])
            claimed = requests.claim(connection, owner=owner, ids=given)
            return claimed, over | set(requests.ended_of(connection, list(given)))

        try:
            claimed, ended = await self._journal.write(work)
        except StoreError:
            for request, message in came:
                self._hold(request, message)
            raise
        mine = {request.id for request in claimed}
        for request, message in came:
            if request.id in ended:
                await _acknowledge(message)
            elif await self._renew(message):
                pass  # the copy is held as one that came twice
            elif request.id in mine and request.id not in self._running:
                self._running[request.id] = message
            else:
                self._hold(request, message)
        return claimed

    def _hold(self, request: DurableRequest, message: AbstractIncomingMessage) -> None:
        self._held.setdefault(request.id, (request, []))[1].append(message)

    def _take_held(self) -> list[tuple[DurableRequest, AbstractIncomingMessage]]:
        """Take what is held, to claim what no server has any more."""
        held, self._held = self._held, {}
        return [(request, message) for request, several in held.values() for message in several]

    async def _renew(self, message: AbstractIncomingMessage) -> bool:
        """Put a copy in the place of a message that was returned often; return whether that was done.

        A death between both leaves two, of which one counts.
        """
        headers, link = message.headers or {}, self._link
        # Which of both the limit is for depends on the broker's version.
        returns = [headers.get(name) for name in ("x-delivery-count", "x-acquired-count")]
        if link is None or max((each for each in returns if isinstance(each, int)), default=0) < RENEWED:
            return False
        try:
            async with asyncio.timeout(_CONFIRM):
                await self._publish(link, message.message_id or "", message.body)
        except Exception as error:
            _log.warning("a message that was returned often stays as it is: %s", str(error) or type(error).__name__)
            return False
        await _acknowledge(message)
        return True

    # -- the connection ------------------------------------------------------------------------------------------------

    async def _connected(self, seconds: float) -> _Link:
        try:
            async with asyncio.timeout(seconds):
                while self._link is None:
                    self._linked.clear()
                    await self._linked.wait()
                return self._link
        except TimeoutError:
            raise StoreError("the broker cannot be reached") from None

    async def _stay_connected(self) -> None:
        while True:
            link: _Link | None = None
            try:
                async with asyncio.timeout(_CONNECT):  # a queue that has no leader yet does not answer
                    link = await self._connect()
                self._link = link
                self._linked.set()
                await link.closed.wait()
                _log.warning("the connection to the broker broke")
            except Exception as error:
                _log.warning("the broker cannot be reached: %s", str(error) or type(error).__name__)
            finally:
                self._drop_deliveries()
                if link is not None:
                    with suppress(Exception):
                        await link.connection.close()
            await asyncio.sleep(_AGAIN)

    def _drop_deliveries(self) -> None:
        """Drop the deliveries of a connection that is gone: they come again."""
        self._link = None
        self._running.clear()
        self._held.clear()
        while not self._came.empty():
            self._came.get_nowait()

    async def _connect(self) -> _Link:
        import aio_pika

        connection = await aio_pika.connect(self._url, timeout=_CONNECT)
        try:
            publishing, consuming = await connection.channel(), await connection.channel()
            await consuming.declare_queue(DEAD, durable=True, arguments={"x-queue-type": "quorum"})
            queue = await consuming.declare_queue(
                self._name,
                durable=True,
                arguments={
                    "x-queue-type": "quorum",
                    "x-delivery-limit": DELIVERIES,
                    "x-dead-letter-exchange": "",
                    "x-dead-letter-routing-key": DEAD,
                },
            )
            await consuming.set_qos(prefetch_count=self._prefetch)
            link = _Link(connection, publishing)
            for each in (connection, publishing, consuming):
                each.close_callbacks.add(lambda *_: link.closed.set())
            await queue.consume(self._came.put)
        except BaseException:
            await connection.close()
            raise
        return link


async def _acknowledge(message: AbstractIncomingMessage) -> None:
    """Acknowledge a message; if its channel is gone, it comes again, and is acknowledged then."""
    with suppress(Exception):
        await message.ack()
