"""Trace events for the segments of a step."""

from __future__ import annotations

from runtime.control.trace_events import TraceEvents
from runtime.types import SegmentRun, TraceEvent


class Kept:
    """A trace sink that keeps all events."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def emit(self, event: TraceEvent) -> None:
        self.events.append(event)


def test_a_stitch_is_told_apart_from_other_runs():
    sink = Kept()
    runs = [
        SegmentRun(("a", "b"), "segment", (0, 0), ("m", "n"), 3, 7),
        SegmentRun(("s",), "stitch", (None,), ("n",), 1, 2),
    ]
    TraceEvents(sink, "cpu").segments(5, 1, tuple(runs))
    told = [(event.ev, event.n, event.extra["models"], event.extra["kind"]) for event in sink.events]
    assert told == [("segment.run", 7, ("m", "n"), "segment"), ("stitch.apply", 2, ("n",), "stitch")]
