"""Events of lines are written a quarter of a second late, those of interactive requests at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.durable.execution import gathered
from runtime.server.durable.transcript import AddedEvents, Chunk
from runtime.types import TokenEvent
from tests.runtime.server.batches.asking import ended, line, lines_of, submit
from tests.runtime.server.harness import Running, eventually, running


def step(number: int) -> tuple[int, AddedEvents]:
    return number, AddedEvents([TokenEvent("r/0", "r", number, number)], [Chunk(number, b"%d" % number)], [])


def taken(steps: Sequence[tuple[float, int]], seconds: float) -> list[tuple[int, list[int], list[int]]]:
    """Return what `gathered` makes of steps that come after so many seconds each: first numbers, events and chunks."""

    async def come() -> AsyncIterator[tuple[int, AddedEvents]]:
        for after, number in steps:
            await asyncio.sleep(after)
            yield step(number)

    async def take() -> list[tuple[int, list[int], list[int]]]:
        return [
            (first, [event.index for event in added.events], [chunk.number for chunk in added.chunks])
            async for first, added in gathered(come(), seconds)
        ]

    return asyncio.run(take())


def test_each_step_at_once_without_a_time() -> None:
    assert taken([(0, 4), (0, 5), (0, 6)], 0.0) == [(4, [4], [4]), (5, [5], [5]), (6, [6], [6])]


def test_steps_of_a_time_are_joined_and_the_rest_has_no_events() -> None:
    found = taken([(0, 4), (0.3, 5), (0, 6), (0.3, 7), (0, 8), (0, 9)], 0.2)
    assert found == [(4, [4, 5], [4, 5]), (6, [6, 7], [6, 7]), (8, [], [8, 9])]


def appends(server: Running) -> float:
    with server.http() as http:
        text = http.get("/metrics").text
    return next(float(each.split()[1]) for each in text.splitlines() if each.startswith("blockzoo:queue_appends_total"))


def test_short_lines_write_only_their_answers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with running(tokenizer, queue=str(tmp_path / "q")) as server, server.client() as client, server.http() as http:
        done = ended(client, submit(client, [line(number) for number in range(20)]).id)
        assert done.request_counts is not None and done.request_counts.completed == 20
        assert appends(server) == 0
        body = {"model": "org/base", "prompt": "a", "max_tokens": 3}
        http.post("/v1/completions", json=body, headers={"Idempotency-Key": "k"}).raise_for_status()
        assert appends(server) >= 1


def test_a_long_line_goes_on_behind_what_was_written(tokenizer: Tokenizer, tmp_path: Path) -> None:
    queue, config = str(tmp_path / "q"), ServerConfig(max_num_seqs=4)
    long = [line(0, max_tokens=60, ignore_eos=True)]
    computed: list[Any] = []
    slow = running(tokenizer, config=config, queue=queue, pace=lambda step: computed.append(step) or time.sleep(0.02))
    with slow as server, server.client() as client:
        batch = submit(client, long).id
        assert eventually(lambda: appends(server) >= 2, 30)
    assert dict(lines_of(queue, batch)).popitem()[1] == "queued"
    before = len(computed)
    with running(tokenizer, config=config, queue=queue, pace=computed.append) as server, server.client() as client:
        assert ended(client, batch).status == "completed"
    assert before > 20 and len(computed) < 60 + before - 10, "what was written is not computed again"
