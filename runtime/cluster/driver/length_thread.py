"""Predict lengths of answers on a thread of its own, beside prefill (TI-10, TI-13).

    parallel    request -> scheduler at once; its forecast follows as soon as there is one
    sequential  request -> forecast -> scheduler, with the forecast

What comes while a batch is predicted is predicted together next. One that fails costs nothing but the forecast.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from runtime.control.counters import AgentCounters
from runtime.control.scheduler_io import AddRequests, LengthPredicted
from runtime.policy.lengths.forecast import LengthForecast
from runtime.types import SequenceRequest

_log = logging.getLogger(__name__)

LengthMode = Literal["parallel", "sequential"]
#: Returns a forecast for each request, in order; None for those of models without a predictor.
Predict = Callable[[Sequence[SequenceRequest]], Sequence[LengthForecast | None]]
#: Requests that are predicted at a time.
_MOST = 64


class _Scheduling(Protocol):
    def submit(self, requests: Sequence[SequenceRequest]) -> None: ...

    def add_predicted(self, event: AddRequests) -> None: ...

    def tell_lengths(self, events: Sequence[LengthPredicted]) -> None: ...

    def abort(self, seqs: Sequence[str]) -> None: ...


class LengthThread:
    """Predicts for one driver. Methods may be called from any thread.

    Attributes:
        predicted, left_out: Requests with a forecast so far, and without one.
        seconds: Time that predictions took.
    """

    def __init__(self, predict: Predict, loop: _Scheduling, mode: LengthMode) -> None:
        self._predict, self._loop, self._mode = predict, loop, mode
        self._asked: queue.SimpleQueue[tuple[SequenceRequest, ...] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self._aborted: set[str] = set()
        self.predicted, self.left_out, self.seconds = 0, 0, 0.0
        self._thread = threading.Thread(target=self._run, name="zoo-lengths", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the batch under way."""
        self._asked.put(None)

    def submit(self, requests: Sequence[SequenceRequest]) -> None:
        """Pass requests to the scheduler: now, or with their forecasts."""
        if self._mode == "parallel":
            self._loop.submit(requests)
        else:
            with self._lock:
                self._held.update(one.seq for one in requests)
        self._asked.put(tuple(requests))

    def counted(self, counters: AgentCounters) -> AgentCounters:
        """Return counters with what this thread has counted."""
        return replace(counters, unpredicted=self.left_out, prediction_ns=round(self.seconds * 1e9))

    def abort(self, seqs: Iterable[str]) -> None:
        """End sequences; those that are held end once the scheduler has them."""
        given = tuple(seqs)
        with self._lock:
            self._aborted.update(self._held.intersection(given))
        self._loop.abort(given)

    def _run(self) -> None:
        while (some := self._await_requests()) is not None:
            begun = time.perf_counter()
            try:
                forecasts = list(self._predict(some))
            except Exception:
                _log.exception("lengths of %d answers could not be predicted", len(some))
                forecasts = [None] * len(some)
            self.seconds += time.perf_counter() - begun
            made = sum(each is not None for each in forecasts)
            self.predicted, self.left_out = self.predicted + made, self.left_out + len(some) - made
            self._pass_on(some, forecasts)

    def _await_requests(self) -> tuple[SequenceRequest, ...] | None:
        """Return what waits, at most `_MOST` requests; None at the end."""
        first = self._asked.get()
        some = list(first or ())
        while first is not None and len(some) < _MOST and not self._asked.empty():
            more = self._asked.get()
            if more is None:
                self._asked.put(None)
                break
            some += more
        return None if first is None else tuple(some)

    def _pass_on(self, some: Sequence[SequenceRequest], forecasts: Sequence[LengthForecast | None]) -> None:
        pairs = list(zip(some, forecasts, strict=True))
        if self._mode == "parallel":
            self._loop.tell_lengths([LengthPredicted(one.seq, each) for one, each in pairs if each is not None])
            return
        self._loop.add_predicted(AddRequests(tuple(some), tuple(forecasts)))
        with self._lock:
            names = {one.seq for one in some}
            late = self._aborted & names
            self._held -= names
            self._aborted -= names
        if late:
            self._loop.abort(sorted(late))
