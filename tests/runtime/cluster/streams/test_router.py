"""The stream router: events reach their stream, and sequences whose event loop is closed are named once each."""

from __future__ import annotations

import asyncio

from runtime.cluster.streams.router import StreamRouter
from runtime.cluster.streams.streams import Stream
from runtime.types import SamplingParams, SequenceRequest, TokenEvent


def event(seq: str, index: int, finish: str | None = None) -> TokenEvent:
    return TokenEvent(seq, "r", index, 1, finish=finish)  # type: ignore[arg-type]


def test_of_a_closed_loop_only_living_sequences_are_named_and_each_once() -> None:
    routes, loop = StreamRouter(), asyncio.new_event_loop()
    stream = Stream(["goes on", "ends"], loop, lambda seqs: None)
    routes.add([SequenceRequest(seq, "r", "m", (1,), SamplingParams(9)) for seq in ("goes on", "ends")], stream)
    loop.close()
    deaf = routes.deliver([event("goes on", 0), event("goes on", 1), event("ends", 0), event("ends", 1, "stop")])
    assert deaf == ["goes on"]
    assert len(routes) == 0
