"""The contract of an intake, over SQLite, PostgreSQL, and RabbitMQ before SQLite; and what only a broker can do."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from runtime.queueing import batches, requests
from runtime.queueing.broker import DEAD, RabbitIntake
from runtime.queueing.database import QueueDatabase
from runtime.queueing.intake import Intake, TableIntake
from runtime.queueing.journal import Journal
from runtime.queueing.records import DurableRequest, StoredAnswer
from tests import postgres, rabbitmq
from tests.runtime.queueing.test_batches import batch, line
from tests.runtime.queueing.test_requests import GIVEN_UP, NOW, made
from zoo.errors import StoreError

_names = itertools.count()
DONE = StoredAnswer(200, b"{}")


@dataclass
class Server:
    """One server's side of an intake."""

    intake: Intake
    journal: Journal

    async def claim(self, most: int = 10, seconds: float = 3.0) -> list[str]:
        """Claim what comes within a time."""
        found: list[str] = []
        end = time.monotonic() + seconds
        while len(found) < most and time.monotonic() < end:
            try:
                claimed = await asyncio.wait_for(self.intake.claim(most - len(found)), end - time.monotonic())
            except TimeoutError:
                break
            found += [each.id for each in claimed]
            await asyncio.sleep(0 if claimed else 0.05)
        return found

    async def none_comes(self) -> bool:
        return await self.claim(1, 1.5) == []

    async def answer(self, request: str) -> bool:
        """Write a request's answer, then acknowledge it; return whether it had none."""
        fresh = await self.journal.write(partial(requests.finish, request=request, state="done", given=DONE, now=NOW))
        await self.intake.ack(request)
        return fresh

    async def recover(self) -> None:
        """Take over what dead servers have left, as a server does when it starts."""
        await self.journal.write(partial(requests.recover, given=GIVEN_UP, now=NOW))


Servers = Callable[[], Any]


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.postgres),
        pytest.param("rabbitmq", marks=pytest.mark.rabbitmq),
    ]
)
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Servers:
    """Open one server after the other on one queue."""
    rabbit: rabbitmq.Broker | None = None
    target = str(tmp_path / "queue")
    if request.param == "rabbitmq":
        rabbit = request.getfixturevalue("rabbit")
    elif request.param == "postgresql":
        target = postgres.new_database(request.getfixturevalue("postgres_server"))
    return partial(opened, target, rabbit, f"test-{next(_names)}")


@asynccontextmanager
async def opened(target: str, rabbit: rabbitmq.Broker | None, name: str) -> AsyncIterator[Server]:
    database = QueueDatabase(target, patience=30)
    journal = Journal(database)
    intake: Intake = TableIntake(journal)
    if rabbit is not None:
        intake = RabbitIntake(rabbit.url, name, journal, prefetch=8)
        await intake.open()
    try:
        yield Server(intake, journal)
    finally:
        if isinstance(intake, RabbitIntake):
            await intake.close()
        await journal.close()
        database.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 90))  # type: ignore[arg-type]


def test_what_is_put_is_claimed_in_order_and_once(servers: Servers) -> None:
    async def work() -> None:
        async with servers() as server:
            await server.intake.put([made(i) for i in range(1, 6)])
            assert await server.claim(2) == ["cmpl-1", "cmpl-2"]
            assert await server.claim(5) == ["cmpl-3", "cmpl-4", "cmpl-5"]
            assert await server.none_comes()
            with server.journal.database.reading() as connection:
                found = requests.get(connection, "cmpl-4")
            assert found is not None and (found.state, found.body, found.seed) == ("running", b"{}", 7)

    run(work)


def test_a_request_that_is_put_again_counts_once(servers: Servers) -> None:
    async def work() -> None:
        async with servers() as server:
            await server.intake.put([made(1)])
            await server.intake.put([made(1, seed=9)])
            assert await server.claim(1) == ["cmpl-1"]
            await server.intake.put([made(1, seed=10)])
            assert await server.none_comes()
            assert await server.answer("cmpl-1")
            await server.intake.put([made(1)])
            assert await server.none_comes()
            assert not await server.answer("cmpl-1")

    run(work)


def test_what_is_released_comes_again(servers: Servers) -> None:
    async def work() -> None:
        async with servers() as server:
            await server.intake.put([made(1), made(2)])
            assert await server.claim(2) == ["cmpl-1", "cmpl-2"]
            await server.intake.release(["cmpl-2"])
            assert await server.claim(1) == ["cmpl-2"]
            assert await server.answer("cmpl-2")
            assert await server.none_comes()

    run(work)


def test_what_a_server_had_when_it_ended_comes_to_the_next_but_for_what_is_answered(servers: Servers) -> None:
    async def work() -> None:
        async with servers() as server:
            await server.intake.put([made(i) for i in range(1, 5)])
            assert await server.claim(3) == ["cmpl-1", "cmpl-2", "cmpl-3"]
            assert await server.answer("cmpl-1")
            # answered, and not acknowledged
            await server.journal.write(partial(requests.finish, request="cmpl-2", state="done", given=DONE, now=NOW))
        async with servers() as server:
            await server.recover()
            assert sorted(await server.claim(2)) == ["cmpl-3", "cmpl-4"]
            assert await server.none_comes()

    run(work)


# -- a broker ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def brokered(rabbit: rabbitmq.Broker, tmp_path: Path) -> Servers:
    return partial(opened, str(tmp_path / "queue"), rabbit, f"test-{next(_names)}")


@pytest.mark.rabbitmq
def test_an_answer_counts_once_after_the_consumers_time_is_over(brokered: Servers) -> None:
    async def work() -> None:
        async with brokered() as server:
            await server.intake.put([made(1)])
            assert await server.claim(1) == ["cmpl-1"]
            link = server.intake._link
            # The broker closes the channel and delivers again, to the new one: it runs already.
            assert await server.claim(1, rabbitmq.CONSUMER_TIMEOUT_MS / 1000 + 4) == []
            assert server.intake._link is not link, "the time-out was not reached"
            assert await server.answer("cmpl-1")
            assert await server.none_comes()
        async with brokered() as server:
            assert await server.none_comes()

    run(work)


@pytest.mark.rabbitmq
@pytest.mark.postgres
def test_another_server_holds_what_one_runs_and_takes_it_up_after_its_death(
    rabbit: rabbitmq.Broker, postgres_server: str
) -> None:
    async def work() -> None:
        target, name = postgres.new_database(postgres_server), f"test-{next(_names)}"
        async with opened(target, rabbit, name) as second:
            async with opened(target, rabbit, name) as first:
                await first.intake.put([made(1)])
                claimed = await asyncio.gather(first.claim(1, 2), second.claim(1, 2))
                assert sorted(map(len, claimed)) == [0, 1]
                holder, other = (first, second) if claimed[0] else (second, first)
                await holder.intake.put([made(1)])  # a duplicate, for either
                assert await other.none_comes()
            if holder is first:  # its part has ended
                await second.recover()
                assert await second.claim(1, 8) == ["cmpl-1"]
            assert await second.answer("cmpl-1")
            assert await second.none_comes()

    run(work)


@pytest.mark.rabbitmq
def test_lines_of_batches_that_run_no_more_are_dropped(brokered: Servers) -> None:
    async def work() -> None:
        async with brokered() as server:
            await server.journal.write(partial(batches.put, batch=batch(1, status="in_progress")))
            await server.journal.write(partial(batches.put, batch=batch(2, status="cancelling")))
            lines: Sequence[DurableRequest] = [line(1), line(1, "batch_2"), line(1, "batch_3"), line(2)]
            await server.intake.put(lines)
            assert await server.claim(4, 2) == ["cmpl-batch_1-1", "cmpl-batch_1-2"]
            with server.journal.database.reading() as connection:
                assert requests.get(connection, "cmpl-batch_2-1") is None
                found = requests.get(connection, "cmpl-batch_1-2")
            assert found is not None and found.source == line(2).source and found.body is None

    run(work)


@pytest.mark.rabbitmq
def test_what_is_no_request_goes_to_the_dead_letters(brokered: Servers) -> None:
    async def work() -> None:
        async with brokered() as server:
            from aio_pika import Message

            channel = server.intake._link.publishing
            before = (await channel.declare_queue(DEAD, passive=True)).declaration_result.message_count
            await channel.default_exchange.publish(Message(b"\xff no request"), server.intake._name)
            await server.intake.put([made(1)])
            assert await server.claim(1) == ["cmpl-1"]
            for _ in range(100):
                count = (await channel.declare_queue(DEAD, passive=True)).declaration_result.message_count
                if count == before + 1:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("it is not among the dead letters")

    run(work)


@pytest.mark.rabbitmq
def test_a_broker_that_was_killed_comes_back_with_what_it_had(rabbit: rabbitmq.Broker, brokered: Servers) -> None:
    async def work() -> None:
        async with brokered() as server:
            await server.intake.put([made(1), made(2), made(3)])
            assert await server.claim(1) == ["cmpl-1"]
            await asyncio.sleep(rabbitmq.SETTLED)
            rabbit.kill()
            try:
                server.intake._linked.clear()
                with pytest.raises(StoreError, match="broker"):
                    await server.intake.put([made(4)])
            finally:
                await asyncio.to_thread(rabbit.start)
            assert await server.claim(2, 30) == ["cmpl-2", "cmpl-3"]
            assert await server.answer("cmpl-1")
            await server.intake.put([made(4)])
            assert await server.claim(1, 10) == ["cmpl-4"]

    run(work)


def test_a_claim_that_is_cancelled_ends_though_a_message_comes() -> None:
    """Else the server's shutdown would wait for the next message. The message stays, for the next claim."""

    async def work() -> None:
        intake = RabbitIntake("amqp://unused", "requests", cast(Journal, None), 1)
        task = asyncio.create_task(intake.claim(1))
        for _ in range(10):
            await asyncio.sleep(0)
        intake._came.put_nowait(cast(Any, object()))
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled()
        assert intake._came.qsize() == 1

    asyncio.run(work())


@dataclass
class Message:
    """A delivery without a broker."""

    body: bytes
    acknowledged: bool = False
    headers: Any = None

    async def ack(self) -> None:
        self.acknowledged = True


@asynccontextmanager
async def delivered(folder: Path, *given: int) -> AsyncIterator[tuple[RabbitIntake, Journal, list[Message]]]:
    """Make an intake that these requests have come to."""
    database = QueueDatabase(str(folder / "queue"))
    journal = Journal(database)
    intake = RabbitIntake("amqp://unused", "requests", journal, 8)
    messages = [Message(msgspec.msgpack.encode(made(number))) for number in given]
    for message in messages:
        intake._came.put_nowait(cast(Any, message))
    try:
        yield intake, journal, messages
    finally:
        await journal.close()
        database.close()


def test_what_came_while_the_store_failed_is_claimed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with delivered(tmp_path, 1, 2) as (intake, journal, messages):

            async def full(work: object) -> None:
                raise StoreError("the disk is full")

            with monkeypatch.context() as patch:
                patch.setattr(journal, "write", full)
                for _ in range(2):  # what has come, and what is held since
                    with pytest.raises(StoreError, match="full"):
                        await intake.claim(4)
            assert sorted(each.id for each in await intake.claim(4)) == ["cmpl-1", "cmpl-2"]
            await intake.ack("cmpl-2")
            assert [message.acknowledged for message in messages] == [False, True]

    run(work)


def test_what_is_held_is_claimed_though_messages_keep_coming(tmp_path: Path) -> None:
    async def work() -> None:
        async with delivered(tmp_path) as (intake, _, _):
            intake._hold(made(1), cast(Any, Message(b"")))
            claimed: list[str] = []
            end = time.monotonic() + 10
            for number in itertools.count(2):
                intake._came.put_nowait(cast(Any, Message(msgspec.msgpack.encode(made(number)))))
                claimed += [each.id for each in await intake.claim(1)]
                if "cmpl-1" in claimed or time.monotonic() > end:
                    break
                await asyncio.sleep(0.1)
            assert "cmpl-1" in claimed

    run(work)
