"""Run the state machine of one manager of the pool (the paper's gManager, IL-10 to IL-16).

    agents --PoolBeat--> manager          scheduler --PoolQuery--> manager --PoolAnswer--> scheduler
                                          scheduler --PoolDenial--> all managers

Contract:
- It knows of the cluster what heartbeats and denials say, and nothing of the scheduler's account. So its view is stale,
  and it recommends only: the creditor has the last word (IL-15).
- All that it knows comes again with the next heartbeats. A copy that is started in its place needs nothing of it.
- The caller passes the time (ns of any clock that does not go back).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.control.pool_io import PoolAnswer, PoolDenial, PoolOffer, PoolQuery
from runtime.lending_config import LendingConfig
from runtime.messages.to_pool import PoolBeat
from runtime.policy.lending.offers import Lender, rank

#: Creditors in one answer at most (IL-12).
MOST = 3

PoolEvent = PoolBeat | PoolQuery | PoolDenial


@dataclass(slots=True)
class _Heard:
    """What is known of an agent: its latest heartbeat, when it came, and what has happened since."""

    beat: PoolBeat
    heard: int
    promised: int = 0
    paused: bool = False


@dataclass(frozen=True, slots=True)
class PoolInstance:
    """One agent, as a manager knows it. Times in ns.

    Fields:
        room: Pages that it may lend.
        age: Time since its latest heartbeat.
        paused: Whether it has refused since, so that it is not recommended (IL-14).
    """

    id: str
    capacity: int
    free: int
    room: int
    lent: Mapping[str, int]
    age: int
    paused: bool


@dataclass(frozen=True, slots=True)
class PoolPicture:
    """What one manager knows now.

    Fields:
        manager: Its index.
        sorted_age: Age of its sorted list in ns; None before the first one (IL-16).
        instances: The agents that have sent a heartbeat of late, by name.
    """

    manager: int
    sorted_age: int | None
    instances: tuple[PoolInstance, ...]


class PoolManager:
    """The state machine of one manager; see the module docstring for its contract. `number`: its index."""

    def __init__(self, config: LendingConfig, number: int = 0) -> None:
        self._cap = config.cap
        self._period, self._gone = config.beat_ms * 1_000_000, config.gone_ms * 1_000_000
        self._number = number
        self._known: dict[str, _Heard] = {}
        self._sorted: tuple[tuple[int, str], ...] = ()
        self._sorted_at: int | None = None

    def handle(self, event: PoolEvent, now: int) -> PoolAnswer | None:
        """Process an event; return the answer to a query."""
        if self._sorted_at is None or now - self._sorted_at >= self._period:
            self._sort(now)
        match event:
            case PoolBeat():
                self._record(event, now)
            case PoolDenial():
                if (known := self._known.get(event.creditor)) is not None:
                    known.paused = True
            case PoolQuery():
                return self._answer(event, now)
        return None

    def ledger(self, now: int) -> Mapping[tuple[str, str], int]:
        """Return the pages that are lent, by debtor and creditor (IL-11)."""
        return {
            (debtor, device): pages
            for device, known in self._known.items()
            if not self._is_gone(known, now)
            for debtor, pages in known.beat.lent
        }

    def picture(self, now: int) -> PoolPicture:
        """Return what is known, with its age."""
        instances = tuple(
            PoolInstance(
                name, known.beat.capacity, known.beat.free, self._room(known.beat), dict(known.beat.lent),
                now - known.heard, known.paused,
            )
            for name, known in sorted(self._known.items())
            if not self._is_gone(known, now)
        )  # fmt: skip
        return PoolPicture(self._number, None if self._sorted_at is None else now - self._sorted_at, instances)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _record(self, beat: PoolBeat, now: int) -> None:
        """Take a heartbeat in place of the one before; a device that refused is recommended again once it has room.

        The first one of a device makes the sorted list anew.
        """
        before = self._known.get(beat.device)
        paused = before is not None and before.paused and not self._room(beat)
        self._known[beat.device] = _Heard(beat, now, paused=paused)
        if before is None:
            self._sort(now)

    def _sort(self, now: int) -> None:
        """Make the sorted list, most room first, and drop the agents that send no heartbeats any more."""
        self._known = {name: known for name, known in self._known.items() if not self._is_gone(known, now)}
        rooms = ((self._room(known.beat), name) for name, known in self._known.items())
        self._sorted = tuple(sorted(rooms, key=lambda each: (-each[0], each[1])))
        self._sorted_at = now

    def _answer(self, query: PoolQuery, now: int) -> PoolAnswer:
        chosen = rank(self._able(query, now), query.pages, MOST)
        if chosen:
            best = self._known[chosen[0].device]
            best.promised += min(query.wanted, chosen[0].room)
        offers = tuple(PoolOffer(each.device, each.room) for each in chosen)
        return PoolAnswer(query.number, offers, self._number, now - (self._sorted_at or 0))

    def _able(self, query: PoolQuery, now: int) -> list[Lender]:
        """Return the devices that may be recommended to a query. Those with too little room are not even looked at."""
        debtor = self._known.get(query.debtor)
        server = "" if debtor is None else debtor.beat.server
        barred = {query.debtor, *query.path, *query.refused}
        able = []
        for room, name in self._sorted:
            if room < query.pages:
                break
            known = self._known.get(name)
            if known is None or known.paused or name in barred or self._is_gone(known, now):
                continue
            able.append(Lender(name, self._room(known.beat), known.promised, int(known.beat.server != server)))
        return able

    def _room(self, beat: PoolBeat) -> int:
        """Return the pages that an agent may lend by its heartbeat (IL-08)."""
        lent = sum(pages for _, pages in beat.lent)
        return max(0, min(beat.free, int(beat.capacity * self._cap) - lent))

    def _is_gone(self, known: _Heard, now: int) -> bool:
        return now - known.heard > self._gone
