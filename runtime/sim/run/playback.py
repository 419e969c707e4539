"""Feed requests into a virtual clock one after another, and play its events until every request has ended.

Only the next request is held in the clock, so that a workload of a million requests is read as it is played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from runtime.sim.results.recorder import RunRecorder
from runtime.sim.run.clock import EventClass, VirtualClock
from runtime.types import SequenceRequest

#: Number of events between two reports of progress.
_REPORTED = 256


class Stalled(Exception):
    """Requests are alive, and no event is due."""


class Playback:
    """Plays one run.

    Args:
        ledger: Records each request before `arrive` gets it.
        arrive: What a request does when it arrives.
    """

    def __init__(self, clock: VirtualClock, ledger: RunRecorder, arrive: Callable[[SequenceRequest], None]) -> None:
        self._clock, self._ledger, self._arrive = clock, ledger, arrive
        self._coming: Iterator[SequenceRequest] = iter(())
        self._next: SequenceRequest | None = None

    def begin(self, requests: Iterable[SequenceRequest]) -> None:
        """Schedule the first of the requests, which are in order of `arrival`."""
        self._coming = iter(requests)
        self._schedule_next()

    def play(self, progress: Callable[[int], None] | None) -> None:
        """Play events until every request has ended.

        `progress` is called now and then with the number of requests that have ended since the last call. Raises
        Stalled.
        """
        clock, ledger = self._clock, self._ledger
        pop, told = clock.pop, 0
        while self._next is not None or ledger.alive:
            try:
                what = pop()
            except IndexError:
                raise Stalled(f"{ledger.alive} requests are alive at {clock.now} ns, and nothing is due") from None
            what[0](*what[1:])
            if progress is not None and not clock.played % _REPORTED:
                done = len(ledger.arrived) - ledger.alive
                progress(done - told)
                told = done

    def _schedule_next(self) -> None:
        self._next = next(self._coming, None)
        if self._next is not None:
            self._clock.at(self._next.arrival, EventClass.REQUEST, (self._add, self._next))

    def _add(self, request: SequenceRequest) -> None:
        self._ledger.add_request(request, self._clock.now)
        self._schedule_next()
        self._arrive(request)
