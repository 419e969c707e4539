"""What admission needs of an order by deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from runtime.scheduler.residency.waiters import Closing, InTheWay
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.sequence import ScheduledSequence

#: Returns the route that a waiting sequence would take now.
RouteOf = Callable[[ScheduledSequence, int], Route | None]
#: Places a sequence on a route, or where its prefix is; returns whether there was room. Devices without any are added.
Enters = Callable[[ScheduledSequence, Route, set[str], int], bool]


class Bounding(Protocol):
    """An order by deadline, as far as admission needs it."""

    def forecast(self, sequence: ScheduledSequence, now: int) -> None:
        """Forecast the end of a request that has arrived; refuse it if that is too late and `overload` says so."""

    def record_refusal(self, request: str, now: int) -> None:
        """Record that a request has come and does not run."""

    def block(self, sequence: ScheduledSequence, route: Route) -> None:
        """Record a waiting sequence that finds no room on the route that it would take."""

    def block_handoff(self, sequence: ScheduledSequence, route: Route) -> None:
        """Record a sequence with a computed context that finds no room on the route where it is to decode."""

    def backfill(self, route_of: RouteOf, enters: Enters, now: int) -> None:
        """Let waiting sequences run before the first one that found no room in this pass.

        Args:
            route_of: Returns the route that a sequence would take.
            enters: Places a sequence, if there is room.
        """

    def block_load(self, sequence: ScheduledSequence, find: Callable[[], InTheWay | None], close: Closing) -> None:
        """Record a waiting sequence that lacks stages; `find`: returns what is in their way."""

    def holds_back(self, sequence: ScheduledSequence, devices: Iterable[str], now: int) -> bool:
        """Return whether a waiting sequence is not to start on these devices now."""
