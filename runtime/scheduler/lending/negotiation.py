"""Find creditors by asking: a manager of the pool for some, and these one after another (IL-12).

    begin --PoolQuery--> manager --PoolAnswer--> offered: ask the first -> it takes the pages: StartMigration … granted
                                                          it refuses: PoolDenial, ask the next one
                                                          all have refused: PoolQuery that names them
    no answer in time, or no creditor left: the sequence goes on without a loan, and asks again after a heartbeat; if
                                            that does not help for long, it may give way, and asks later

Contract:
- A sequence rests while it asks. Nothing is taken for it before a creditor grants.
- A creditor decides by its own account alone (`refusal`): free pages, its cap, its load. It serves first what asks
  first, and never borrows for it (IL-07, IL-14). So a stale recommendation takes no pages that are not there (IL-15).
- A creditor takes all pages that it is asked to take or none; a sequence has one loan at a time on its way, and may
  have several creditors (IL-17).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runtime.chains import Hop
from runtime.control.pool_io import PoolAnswer, PoolDenial, PoolOffer, PoolQuery
from runtime.policy.lending.creditors import Creditor, refusal
from runtime.policy.lending.shapes import LoanPiece
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Heartbeats for which the answer of a manager is awaited.
_PATIENCE = 2
#: Heartbeats for which a sequence that gives way does not ask again.
_PAUSE = 10


@dataclass(slots=True)
class LoanWish:
    """What a sequence wants to lend.

    Fields:
        device: The device of its path that lacks pages.
        hop: Its hop there.
        pages: Pages that it lacks there.
        need: Free pages that it needs there.
        piece: What it gives away: a creditor must take the least of it.
    """

    sequence: ScheduledSequence
    device: str
    hop: Hop
    pages: int
    need: int
    piece: LoanPiece


@dataclass(slots=True)
class _Talk:
    """One sequence's search for a creditor.

    Fields:
        number: Number of the query under way, or of the loan that a creditor is asked for.
        query: Number of the latest query.
        due: Time until which an answer of a manager is awaited; None while none is.
        asked: The creditor that has been asked last.
    """

    wish: LoanWish
    number: int
    due: int | None
    query: int = 0
    offers: deque[PoolOffer] = field(default_factory=deque)
    refused: tuple[str, ...] = ()
    asked: str = ""


class _Later(NamedTuple):
    """When a sequence may search again, and how often in a row it has searched in vain."""

    due: int
    vain: int


class Negotiations:
    """The searches under way, one per sequence at most.

    Args:
        number: Returns the next number, of those of migrations and loans.
        creditor: Returns a device's own account as a creditor of a sequence; None if it can be none.
        start: Starts a loan of so many units of what is wanted; returns its number, 0 if there are none any more.
        go_on: Lets a sequence go on.
    """

    def __init__(
        self,
        state: ClusterState,
        number: Callable[[], int],
        creditor: Callable[[ScheduledSequence, str, str], Creditor | None],
        start: Callable[[LoanWish, str, int, int], int],
        go_on: Callable[[ScheduledSequence], None],
    ) -> None:
        self._state, self._number = state, number
        self._creditor, self._start, self._go_on = creditor, start, go_on
        config = state.config.lending
        self._beat = config.beat_ms * 1_000_000
        # Searches in vain in a row after which a sequence may give way: what managers know is newer by then.
        self._most_vain = max(3, config.gone_ms // config.beat_ms)
        self._talks: dict[str, _Talk] = {}
        self._later: dict[str, _Later] = {}

    # -- the debtor ----------------------------------------------------------------------------------------------------

    def begin(self, wish: LoanWish, now: int) -> bool:
        """Ask a manager for creditors; return whether the sequence rests for the answer."""
        if self.rests(wish.sequence, now):
            return False
        self._talks[wish.sequence.seq] = talk = _Talk(wish, 0, None)
        self._query(talk, now)
        wish.sequence.hold(True)
        return True

    def rests(self, sequence: ScheduledSequence, now: int) -> bool:
        """Return whether a sequence has searched in vain and does not ask again yet."""
        later = self._later.get(sequence.seq)
        return later is not None and later.due > now

    def is_in_vain(self, sequence: ScheduledSequence) -> bool:
        """Return whether its latest search has found no creditor."""
        return sequence.seq in self._later

    def asks_soon(self, sequence: ScheduledSequence) -> bool:
        """Return whether a sequence that has searched in vain keeps its pages meanwhile."""
        later = self._later.get(sequence.seq)
        return later is not None and later.vain < self._most_vain

    def offered(self, answer: PoolAnswer, now: int) -> None:
        """Ask the creditors that a manager recommends. Answers to queries that have ended are ignored."""
        talk = next(
            (each for each in self._talks.values() if each.due is not None and each.number == answer.number), None
        )
        if talk is None:
            return
        self._state.counters.pool_offers += len(answer.offers)
        self._trace(
            "pool.offer", talk, now, creditors=[each.device for each in answer.offers], manager=answer.manager,
            age_ms=answer.age // 1_000_000,
        )  # fmt: skip
        talk.due, talk.offers = None, deque(answer.offers)
        if not answer.offers:
            self._end(talk, "no device is known to have room", now)
        else:
            self._ask_next(talk, now)

    def granted(self, sequence: ScheduledSequence, now: int) -> None:
        """Record that the creditor has the pages."""
        talk = self._talks.pop(sequence.seq, None)
        self._later.pop(sequence.seq, None)
        if talk is not None:
            self._state.counters.pool_grants += 1
            self._trace("pool.grant", talk, now, talk.asked)

    def denied(self, sequence: ScheduledSequence, why: str, now: int) -> None:
        """Ask the next creditor, as the last one could not take the pages after all."""
        talk = self._talks[sequence.seq]
        self._deny(talk, talk.asked, why, now)
        self._ask_next(talk, now)

    def unheard(self, sequence: ScheduledSequence, why: str, now: int) -> None:
        """End the search of a sequence of which the creditor is not heard any more."""
        if (talk := self._talks.pop(sequence.seq, None)) is not None:
            self._deny(talk, talk.asked, why, now)

    def remove_sequence(self, sequence: ScheduledSequence) -> None:
        """End the search of a sequence that leaves its path.

        Its pages may help those that have searched in vain, which keep theirs; it does not come back before them.
        """
        self._talks.pop(sequence.seq, None)
        for seq, later in self._later.items():
            due = later.due + (_PAUSE * self._beat if seq == sequence.seq else 0)
            self._later[seq] = _Later(due, 0)

    def review(self, now: int) -> None:
        """End queries that no manager has answered in time; look again at sequences that may ask again."""
        for seq, later in list(self._later.items()):
            if seq not in self._state.sequences:
                del self._later[seq]
            elif later.due <= now:
                self._state.changed = True
        for talk in [each for each in self._talks.values() if each.due is not None and each.due <= now]:
            self._state.counters.pool_unanswered += 1
            self._end(talk, "no manager answers", now)

    def check(self) -> None:
        """Raise RuntimeError unless searches and sequences agree."""
        for talk in self._talks.values():
            waits = talk.wish.sequence.waits
            if not waits.held or waits.move != talk.number:
                raise RuntimeError(f"{talk.wish.sequence.seq} asks for a loan, and does not rest")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _query(self, talk: _Talk, now: int) -> None:
        wish, piece = talk.wish, talk.wish.piece
        talk.query = talk.number = self._number()
        talk.due = now + _PATIENCE * self._beat
        wish.sequence.moves(talk.number)
        self._state.counters.pool_queries += 1
        self._state.out.tell_pool(
            PoolQuery(
                talk.number, wish.device, piece.least * piece.unit, piece.most * piece.unit,
                tuple(sorted(wish.sequence.place.devices)), talk.refused,
            )
        )  # fmt: skip
        self._trace("pool.query", talk, now, refused=list(talk.refused))

    def _ask_next(self, talk: _Talk, now: int) -> None:
        """Ask the creditors that are left, one after another; after the last one, a manager for further ones."""
        wish, piece = talk.wish, talk.wish.piece
        if self._state.devices[wish.device].pages.free >= wish.need:
            self._end(talk, "", now)
            return
        while talk.offers:
            offer = talk.offers.popleft()
            units = max(piece.least, min(piece.most, offer.room // piece.unit))
            talk.asked = offer.device
            self._trace("pool.ask", talk, now, offer.device, pages=units * piece.unit)
            creditor = self._creditor(wish.sequence, wish.device, offer.device)
            why = "it is not there" if creditor is None else refusal(creditor, self._busy, units * piece.unit)
            if not why:
                talk.number = self._start(wish, offer.device, units, now)
                if not talk.number:
                    self._end(talk, "its pages are shared", now)
                return
            self._deny(talk, offer.device, why, now)
        self._query(talk, now)

    @property
    def _busy(self) -> float:
        return self._state.config.lending.busy

    def _deny(self, talk: _Talk, creditor: str, why: str, now: int) -> None:
        talk.refused = (*talk.refused, creditor)
        self._state.counters.pool_denials += 1
        self._state.out.tell_pool(PoolDenial(creditor))
        self._trace("pool.deny", talk, now, creditor, why=why)

    def _end(self, talk: _Talk, why: str, now: int) -> None:
        """Let a sequence go on without a loan. `why`: it has found none; empty: it needs none any more."""
        sequence = talk.wish.sequence
        del self._talks[sequence.seq]
        if why:
            before = self._later.get(sequence.seq)
            self._later[sequence.seq] = _Later(now + self._beat, 1 if before is None else before.vain + 1)
            self._state.counters.loans_refused += 1
            self._trace("pool.none", talk, now, why=why)
        self._go_on(sequence)

    def _trace(self, event: str, talk: _Talk, now: int, device: str = "", **extra: Any) -> None:
        self._state.tell.control(
            now, event, "IL-12", device or talk.wish.device, seq=talk.wish.sequence.seq, query=talk.query, **extra
        )
