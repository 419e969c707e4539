"""Feed requests into a virtual clock one after another, and play its events until every request has ended.

Only the next request is held in the clock, so that a workload of a million requests is read as it is played. Of clients
that ask one request after another, the next one comes when one of theirs has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

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
        self._clients, self._late = 0, False

    def begin(self, requests: Iterable[SequenceRequest], clients: int = 0) -> None:
        """Schedule the first of the requests, which are in order of `arrival`.

        `clients`: so many run at a time; what is due beyond that comes when one has ended; 0: any number.
        """
        self._coming, self._clients = iter(requests), clients
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
            if self._late and ledger.alive < self._clients and self._next is not None:
                self._late = False
                self._add(replace(self._next, arrival=clock.now))
            if progress is not None and not clock.played % _REPORTED:
                done = len(ledger.arrived) - ledger.alive
                progress(done - told)
                told = done

    def _schedule_next(self) -> None:
        self._next = next(self._coming, None)
        if self._next is not None:
            due = max(self._next.arrival, self._clock.now)
            self._clock.at(due, EventClass.REQUEST, (self._add, self._next))

    def _add(self, request: SequenceRequest) -> None:
        if self._clients and self._ledger.alive >= self._clients:
            self._late = True
            return
        self._ledger.add_request(request, self._clock.now)
        self._schedule_next()
        self._arrive(request)
