"""What bounds deliveries of a broker: messages that a server holds, deliveries of one, attempts that one claims."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from runtime.queueing import requests
from runtime.queueing.broker import DEAD, DELIVERIES
from tests import rabbitmq
from tests.runtime.queueing.test_intake import Message, Server, Servers, brokered, delivered, run
from tests.runtime.queueing.test_requests import made

__all__ = ["brokered"]


@pytest.mark.rabbitmq
def test_a_server_holds_no_more_messages_than_it_may(brokered: Servers) -> None:
    async def work() -> None:
        async with brokered() as server:
            most = server.intake._prefetch
            await server.intake.put([made(number) for number in range(1, most + 4)])
            claimed = await server.claim(most + 3, 2.0)
            assert len(claimed) == most
            assert await server.answer(claimed[0])
            assert len(await server.claim(3, 2.0)) == 1, "one more for one that is acknowledged"

    run(work)


async def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Wait for a condition; return whether it came true."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        await asyncio.sleep(0.01)
    return holds()


async def dead_letters(server: Server) -> int:
    channel = server.intake._link.publishing
    return int((await channel.declare_queue(DEAD, passive=True)).declaration_result.message_count)


@pytest.mark.rabbitmq
def test_what_comes_too_often_unclaimed_goes_to_the_dead_letters(brokered: Servers, rabbit: rabbitmq.Broker) -> None:
    """As with a message that kills servers before it has a row."""

    async def work() -> None:
        import aio_pika

        async with brokered() as server:
            before, name = await dead_letters(server), server.intake._name
            await server.intake.put([made(1)])
            assert await eventually(lambda: server.intake._came.qsize() == 1)
            server.intake._came.get_nowait()  # it dies with this one
            server.intake._task.cancel()
            await asyncio.wait([server.intake._task])
            for returned in range(2, DELIVERIES + 2):
                async with await aio_pika.connect(rabbit.url) as connection:
                    queue = await (await connection.channel()).get_queue(name, ensure=False)
                    message = await queue.get(timeout=30)
                    assert message is not None and message.headers["x-delivery-count"] == returned - 1
        async with brokered() as server:
            assert await server.none_comes()
            assert await dead_letters(server) == before + 1

    run(work)


@pytest.mark.rabbitmq
def test_what_is_put_down_often_is_no_dead_letter(brokered: Servers) -> None:
    async def work() -> None:
        async with brokered() as server:
            before = await dead_letters(server)
            await server.intake.put([made(1)])
            for _ in range(DELIVERIES + 5):
                assert await server.claim(1) == ["cmpl-1"]
                await server.intake.release(["cmpl-1"])
            assert await server.claim(1) == ["cmpl-1"]
            assert await server.answer("cmpl-1")
            assert await server.none_comes()
            assert await dead_letters(server) == before

    run(work)


@pytest.mark.rabbitmq
@pytest.mark.parametrize("claimed", [True, False])
def test_what_servers_have_when_they_stop_is_no_dead_letter(brokered: Servers, claimed: bool) -> None:
    """Whether it runs, or has only come: restarts say nothing of a message."""

    async def work() -> None:
        async with brokered() as server:
            before = await dead_letters(server)
            await server.intake.put([made(1)])
        for _ in range(DELIVERIES + 5):
            async with brokered() as server:
                if claimed:
                    await server.recover()
                    assert await server.claim(1) == ["cmpl-1"]
                else:
                    assert await eventually(lambda: server.intake._came.qsize() == 1)
        async with brokered() as server:
            await server.recover()
            assert await server.claim(1) == ["cmpl-1"]
            assert await server.answer("cmpl-1")
            assert await server.none_comes()
            assert await dead_letters(server) == before

    run(work)


def test_what_a_message_says_of_its_run_does_not_count(tmp_path: Path) -> None:
    """State, server and attempts are the tables': else a message could end, or be given up, before it has run."""

    async def work() -> None:
        async with delivered(tmp_path) as (intake, journal, _):
            told = made(1, state="running", attempts=requests.MOST_ATTEMPTS, owner=77, ended=5, status=500)
            intake._came.put_nowait(cast(Any, Message(msgspec.msgpack.encode(told))))
            (claimed,) = await intake.claim(1)
            own = journal.database.server
            assert (claimed.id, claimed.state, claimed.attempts, claimed.owner) == ("cmpl-1", "running", 0, own)
            with journal.database.reading() as connection:
                found = requests.get(connection, "cmpl-1")
            assert found is not None
            assert (found.state, found.attempts, found.owner, found.ended, found.status) == (
                "running", 0, own, None, None,
            )  # fmt: skip

    run(work)
