"""What a broker has given is acknowledged or given back in the end, also where the store fails meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime.queueing.records import StoredAnswer
from runtime.server.durable.run import DurableRun
from runtime.server.durable.runs import DurableRuns
from zoo.errors import StoreError

DONE = StoredAnswer(200, b"{}")


class FailingBroker:
    """Notes what it is told; giving back fails so many times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.told: list[tuple[str, str]] = []

    async def ack(self, request: str) -> None:
        self.told.append(("ack", request))

    async def release(self, ids: Collection[str]) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreError("the disk is full")
        self.told += [("release", request) for request in ids]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> DurableRuns:
    monkeypatch.setattr("runtime.server.durable.runs.RETRY_SECONDS", 0.01)
    service = SimpleNamespace(
        config=SimpleNamespace(max_queued=4), driver=SimpleNamespace(alive=True), announced=lambda _: nullcontext()
    )
    return DurableRuns(cast(Any, service), cast(Any, None))


def put_down() -> DurableRun:
    run = DurableRun("cmpl-1", "completion", "principal", b"digest")
    run.close(None, StoreError("the disk is full"))
    return run


def test_giving_back_is_tried_until_it_succeeds(runs: DurableRuns) -> None:
    async def go() -> None:
        broker = FailingBroker(3)
        await asyncio.wait_for(runs._settle(cast(Any, broker), put_down()), 10)
        assert broker.told == [("release", "cmpl-1")]

    asyncio.run(go())


def test_a_request_that_was_started_again_here_is_not_given_back_but_acknowledged_once_answered(
    runs: DurableRuns,
) -> None:
    async def go() -> None:
        broker, first = FailingBroker(1), put_down()
        settling = asyncio.create_task(runs._settle(cast(Any, broker), first))
        await asyncio.sleep(0)
        again = runs._runs["cmpl-1"] = DurableRun("cmpl-1", "completion", "principal", b"digest")
        await asyncio.sleep(0.05)
        assert not settling.done() and broker.told == []
        again.close(DONE)
        await asyncio.wait_for(settling, 10)
        assert broker.told == [("ack", "cmpl-1")]

    asyncio.run(go())


def test_a_server_that_shuts_down_does_not_try_for_ever(runs: DurableRuns) -> None:
    async def go() -> None:
        run = runs._runs["cmpl-1"] = put_down()  # its task has not ended yet
        runs.parking = True
        await asyncio.wait_for(runs._settle(cast(Any, FailingBroker(1 << 30)), run), 10)

    asyncio.run(go())
