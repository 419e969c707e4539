"""What bounds deliveries of a broker: messages that a server holds, deliveries of one, attempts that one claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from runtime.queueing import requests
from runtime.queueing.broker import DEAD, DELIVERIES
from tests.runtime.queueing.test_intake import Message, Servers, brokered, delivered, run
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


@pytest.mark.rabbitmq
def test_what_is_delivered_too_often_goes_to_the_dead_letters(brokered: Servers) -> None:
    async def work() -> None:
        async with brokered() as server:
            channel = server.intake._link.publishing

            async def dead() -> int:
                return int((await channel.declare_queue(DEAD, passive=True)).declaration_result.message_count)

            before = await dead()
            await server.intake.put([made(1)])
            deliveries = 0
            while await server.claim(1, 2.0):
                deliveries += 1
                assert deliveries <= DELIVERIES + 1
                await server.intake.release(["cmpl-1"])
            assert deliveries == DELIVERIES + 1
            assert await dead() == before + 1

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
