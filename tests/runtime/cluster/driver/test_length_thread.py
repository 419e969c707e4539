"""Lengths are predicted beside the scheduler; in both modes each request runs once, whatever fails (TI-13)."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from runtime.cluster.driver.length_thread import LengthThread
from runtime.control.scheduler_io import AddRequests, LengthPredicted
from runtime.policy.lengths.forecast import LengthForecast
from runtime.types import SequenceRequest
from tests.runtime.virtual import request

FORECAST = LengthForecast((0, 20), (0.25, 0.75))


class Recorded:
    """A loop that records what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, LengthForecast | None]] = []
        self.changed = threading.Condition()

    def submit(self, requests: Sequence[SequenceRequest]) -> None:
        self._add([("add", one.seq, None) for one in requests])

    def add_predicted(self, event: AddRequests) -> None:
        self._add([("add", one.seq, each) for one, each in zip(event.requests, event.forecasts, strict=True)])

    def tell_lengths(self, events: Sequence[LengthPredicted]) -> None:
        self._add([("length", each.seq, each.forecast) for each in events])

    def abort(self, seqs: Sequence[str]) -> None:
        self._add([("abort", seq, None) for seq in seqs])

    def _add(self, some: list[tuple[str, str, LengthForecast | None]]) -> None:
        with self.changed:
            self.told += some
            self.changed.notify_all()

    def wait(self, count: int) -> list[tuple[str, str, LengthForecast | None]]:
        """Wait until so much was told."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.told) >= count, 10), self.told
            return list(self.told)


def asked(*names: str) -> list[SequenceRequest]:
    return [request(name, range(5)) for name in names]


def test_in_parallel_requests_run_at_once_and_forecasts_follow() -> None:
    loop, go = Recorded(), threading.Event()

    def predict(requests: Sequence[SequenceRequest]) -> list[LengthForecast | None]:
        go.wait(10)
        return [None if one.seq == "b" else FORECAST for one in requests]

    thread = LengthThread(predict, loop, "parallel")
    thread.start()
    thread.submit(asked("a", "b", "c"))
    assert loop.told == [("add", "a", None), ("add", "b", None), ("add", "c", None)]
    go.set()
    assert loop.wait(5)[3:] == [("length", "a", FORECAST), ("length", "c", FORECAST)]
    thread.stop()
    assert thread.predicted == 2 and thread.seconds > 0


def test_in_sequence_requests_run_with_their_forecasts() -> None:
    loop = Recorded()
    thread = LengthThread(lambda requests: [FORECAST] * len(requests), loop, "sequential")
    thread.start()
    thread.submit(asked("a", "b"))
    assert loop.wait(2) == [("add", "a", FORECAST), ("add", "b", FORECAST)]
    thread.stop()


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_prediction_that_fails_costs_nothing_but_the_forecast(mode: str) -> None:
    loop, calls = Recorded(), list[int]()

    def predict(requests: Sequence[SequenceRequest]) -> list[LengthForecast | None]:
        calls.append(len(requests))
        if len(calls) == 1:
            raise RuntimeError("no")
        return [FORECAST] * len(requests)

    thread = LengthThread(predict, loop, mode)  # type: ignore[arg-type]
    thread.start()
    thread.submit(asked("a"))
    loop.wait(1)
    while not calls:
        pass
    thread.submit(asked("b"))
    told = loop.wait(3 if mode == "parallel" else 2)
    assert [each[1] for each in told if each[0] == "add"] == ["a", "b"] and told[-1][1:] == ("b", FORECAST)
    assert ("length", "a", FORECAST) not in told
    thread.stop()


def test_what_is_aborted_while_it_is_held_ends_once_the_scheduler_has_it() -> None:
    loop, go, begun = Recorded(), threading.Event(), threading.Event()

    def predict(requests: Sequence[SequenceRequest]) -> list[LengthForecast | None]:
        begun.set()
        go.wait(10)
        return [FORECAST] * len(requests)

    thread = LengthThread(predict, loop, "sequential")
    thread.start()
    thread.submit(asked("a", "b"))
    assert begun.wait(10)
    thread.abort(["b"])
    go.set()
    told = [each[:2] for each in loop.wait(4)]
    assert told == [("abort", "b"), ("add", "a"), ("add", "b"), ("abort", "b")]
    thread.submit(asked("b2"))
    assert [each[:2] for each in loop.wait(5)][-1] == ("add", "b2")
    thread.stop()


def test_what_comes_meanwhile_is_predicted_together_at_most_64_at_a_time() -> None:
    loop, go, begun, lots = Recorded(), threading.Event(), threading.Event(), list[int]()

    def predict(requests: Sequence[SequenceRequest]) -> list[LengthForecast | None]:
        lots.append(len(requests))
        begun.set()
        go.wait(10)
        return [FORECAST] * len(requests)

    thread = LengthThread(predict, loop, "parallel")
    thread.start()
    thread.submit(asked("first"))
    assert begun.wait(10)
    for at in range(100):
        thread.submit(asked(f"s{at}"))
    go.set()
    loop.wait(202)
    thread.stop()
    assert lots == [1, 64, 36]
