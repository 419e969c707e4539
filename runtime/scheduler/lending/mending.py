"""Mend sequences of which a creditor has died: only the page sets that it held are computed again (IL-18).

    death -> lose: page sets [a, b) of the sequence are nowhere, in some layers; the rest stay where they are
        -> no row in flight -> start --MendPages--> debtor: a row over at most a chunk of them, which attends to all
           tokens before -> MigrationReady: pages of its own again, to keep or to lend -> the next chunk … -> it goes on

Contract:
- Lost page sets are computed in order, so that K and V of all tokens before are there.
- A row passes the layers up to the last lost one, with pages of its own: a lost layer needs what those before it make
  of the tokens. The sequence gets the pages of lost layers, and keeps what it has of the rest, here or on living
  devices.
- A mend is of one hop, the first with losses. Its row passes the hops before, too, where nothing is lost any more.
- The sequence rests meanwhile: rows of its own would attend to what is not there.
- A step that waited for a dead creditor has failed; rows that had nothing else to do with it are sent again. One of a
  sequence with creditors waits for news of them first where no death is known, since such a step may fail before it is,
  and no pages have just come back: then it may have asked a creditor that does not hold them any more.
- Pages are taken as for any next row. Where nothing has room, a sequence keeps what is left of it until dead devices
  are replaced, for a while.
- What is not covered (`why_not`) runs again from its tokens, and so does what fails several times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.chains import Hop
from runtime.messages import LostLayers, MendPages, MigrationFailed, MigrationReady
from runtime.scheduler.lending.loans import Loans
from runtime.scheduler.sequences.parts import LostPages
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Time in ns for which news of a creditor are awaited after a step that it did not answer.
_NEWS = 1_000_000_000
#: Time in ns for which a sequence without room waits for the devices that replace dead ones.
_PATIENCE = 30_000_000_000
#: Rows in a row, without a token between, that may be sent again.
_TRIES = 5


@dataclass(frozen=True, slots=True)
class MendUnderWay:
    """Page sets that are computed again.

    Fields:
        number: Its number in messages, unique among those of loans and migrations.
        hops: The hops that its row passes; what was lost is of the last one.
        lost: All lost page sets of the sequence when it began.
        groups: Page sets [first, last), the first ones that are lost.
    """

    number: int
    sequence: ScheduledSequence
    hops: tuple[Hop, ...]
    lost: tuple[LostPages, ...]
    groups: tuple[int, int]
    began: int

    @property
    def debtor(self) -> str:
        return self.hops[-1].device

    def mends(self, lost: LostPages) -> bool:
        """Return whether the first page sets of what is lost are among these."""
        return lost in self.lost and (lost.hop, lost.groups[0]) == (len(self.hops) - 1, self.groups[0])

    def pages(self) -> Mapping[str, int]:
        """Return the pages that it takes, by device."""
        taken: Counter[str] = Counter()
        for hop in self.hops:
            taken[hop.device] += (self.groups[1] - self.groups[0]) * (hop.layers[1] - hop.layers[0])
        return taken


class Mending:
    """Compute lost page sets of running sequences again.

    Args:
        number: Returns the number of a new mend, of those of migrations.
        go_on: Lets a sequence run that does not wait for a mend any more.
    """

    def __init__(
        self, state: ClusterState, loans: Loans, number: Callable[[], int], go_on: Callable[[ScheduledSequence], None]
    ) -> None:
        self._state, self._loans, self._number, self._go_on = state, loans, number, go_on
        self._under_way: dict[int, MendUnderWay] = {}
        self._waiting: dict[str, tuple[ScheduledSequence, int]] = {}

    # -- losses --------------------------------------------------------------------------------------------------------

    def why_not(self, sequence: ScheduledSequence) -> str:
        """Return why a sequence cannot be mended; empty if it can."""
        if not self._state.config.lending.mend:
            return "pages are not mended here"
        if sequence.flying and sequence.issued > 1 and sequence.phase == "decode":
            return "it decodes on credit"
        if sequence.predicted is not None:
            return "a hop of it is predicted"
        if sequence.waits.doomed or sequence.swapped is not None:
            return "it is about to leave its path"
        return ""

    def lose(self, sequence: ScheduledSequence, device: str, now: int) -> None:
        """Record that a creditor of a sequence has died, with all that it held; nothing of the sequence is under way
        there any more.
        """
        gone = [each for each in self._loans.of_sequence(sequence) if each.creditor == device]
        for loan in gone:
            self._loans.remove(loan)
            self._state.page_accounting.change_place(sequence.pages.holding, loan.debtor, "", *loan.groups, loan.layers)
            some: dict[str, Any] = {} if loan.is_of_all_layers else {"layers": list(loan.layers)}
            some |= {"creditor": device, "loan": loan.number, "groups": list(loan.groups)}
            self._trace("kv.lost", loan.debtor, sequence, now, **some)
        sequence.lenders = frozenset(each.creditor for each in self._loans.of_sequence(sequence))
        new = [LostPages(each.number, sequence.path.index(each.hop), each.groups, each.layers) for each in gone]
        sequence.lose(tuple(sorted((*sequence.lost, *new), key=lambda each: (each.hop, each.groups, each.layers))))
        if gone:
            sequence.failures = sequence.failures.with_loss(now)
        if self._waiting.pop(sequence.seq, None) is not None:
            self._go_on(sequence)
        self._state.ready.append(sequence)

    def restarts(self, sequence: ScheduledSequence, why: str, now: int) -> None:
        """Record that a sequence runs again from its tokens, as its lost page sets are not mended."""
        sequence.failures = sequence.failures.with_loss(now)
        self._state.counters.loss_restarts += 1
        self._state.counters.restarted_tokens += sequence.computed
        self._trace("kv.mend.none", sequence.path[0].device if sequence.path else "", sequence, now, why=why)

    def runs_again(self, sequence: ScheduledSequence, known: bool, now: int) -> bool:
        """Return whether the row of a sequence may be sent again after a step that a creditor did not answer.

        `known`: which one it was is known, as another sequence of the step has lost page sets or leaves its path.
        """
        failures = sequence.failures
        if not self._state.config.lending.mend or sequence.predicted is not None or failures.again >= _TRIES:
            return False
        sequence.failures = failures.once_more()
        # The first row after a recall may be faster over earlier hops than the order to use what has come back.
        early = self._loans.came_back.get(sequence.seq) == sequence.computed and failures.again < _TRIES - 1
        if sequence.lenders and not sequence.lost and not known and not early:
            self._await_news(sequence, now)
        else:
            self._state.ready.append(sequence)
        return True

    # -- mending -------------------------------------------------------------------------------------------------------

    def wanted(self, sequence: ScheduledSequence) -> int:
        """Return how many lost page sets of a sequence are to be computed next: at most those of a chunk.

        The same layers of all of them are lost.
        """
        hop, first = sequence.lost[0].hop, sequence.lost[0].groups[0]
        last = min(edge for each in sequence.lost if each.hop == hop for edge in each.groups if edge > first)
        limits, spec = self._state.limits, sequence.spec
        chunk = min(self._state.config.prefill_chunk, limits.chunk(spec, sequence.place.weights))
        return min(last - first, max(1, chunk // spec.page_tokens))

    def start(self, sequence: ScheduledSequence, groups: int, now: int) -> None:
        """Compute the first lost page sets again; the caller has checked that there is room for them."""
        first, width = sequence.lost[0].groups[0], sequence.spec.page_tokens
        hops = sequence.path[: sequence.lost[0].hop + 1]
        mend = MendUnderWay(self._number(), sequence, hops, sequence.lost, (first, first + groups), now)
        self._under_way[mend.number] = mend
        for device, pages in mend.pages().items():
            self._state.devices[device].pages.used += pages
        sequence.moves(mend.number)
        sequence.hold(True)
        path = tuple((hop.device, hop.lo) for hop in hops)
        lost = tuple(LostLayers(each.loan, each.layers) for each in sequence.lost if mend.mends(each))
        tokens = sequence.first((first + groups) * width)[first * width :]
        self._state.out.add_message(
            hops[0].device, MendPages(mend.number, sequence.seq, sequence.epoch, path, lost, first * width, tokens)
        )
        self._trace("kv.mend.start", mend.debtor, sequence, now, groups=list(mend.groups))

    def arrived(self, event: MigrationReady, now: int) -> bool:
        """Record page sets that are there again; return whether the answer is that of a mend."""
        mend = self._end(event.move)
        if mend is None:
            return False
        sequence, (first, last) = mend.sequence, mend.groups
        # What was lost meanwhile, also of these page sets, is not there.
        held, places = sequence.pages.holding, self._state.page_accounting
        for each in filter(mend.mends, sequence.lost):
            places.change_place(held, mend.debtor, mend.debtor, first, last, each.layers)
        cut = (each.behind(last) if mend.mends(each) else each for each in sequence.lost)
        sequence.lose(tuple(each for each in cut if each is not None))
        counters = self._state.counters
        counters.mended_tokens += (last - first) * sequence.spec.page_tokens
        counters.mends += not sequence.lost
        self._trace("kv.mend", mend.debtor, sequence, now, groups=[first, last])
        self._go_on(sequence)
        return True

    def refused(self, event: MigrationFailed, now: int) -> bool:
        """Try again, or give up, where page sets cannot be computed; return whether the answer is that of a mend."""
        mend = self._end(event.move)
        if mend is None:
            return False
        sequence = mend.sequence
        sequence.moves(0)
        self._go_on(sequence)
        if sequence.failures.again >= _TRIES:
            self.restarts(sequence, event.reason, now)
            sequence.doom(event.reason)
            return True
        sequence.failures = sequence.failures.once_more()
        if mend.lost is sequence.lost and sequence.lenders:  # else it is known what has gone
            self._await_news(sequence, now)
        return True

    def awaits_device(self, sequence: ScheduledSequence, now: int) -> bool:
        """Return whether a sequence to mend keeps its pages until dead devices are replaced."""
        late = now - sequence.failures.since > _PATIENCE
        return (
            bool(sequence.lost) and not late and any(not each.alive and not each.final for each in self._state.devices)
        )

    def review(self, now: int) -> None:
        """Let sequences go on that have waited long enough for news of their creditors."""
        for seq, (sequence, since) in list(self._waiting.items()):
            if now - since > _NEWS:
                del self._waiting[seq]
                if not sequence.waits.move:
                    self._go_on(sequence)
                elif self._loans.recall_of(sequence) is not None and not sequence.flying:
                    sequence.hold(False)  # its pages come back meanwhile
                    self._state.ready.append(sequence)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def give_up(self, sequence: ScheduledSequence, why: str, now: int) -> bool:
        """Let a sequence run again from its tokens if nothing is heard of its mend; return whether there was one."""
        mend = self._under_way.get(sequence.waits.move)
        if mend is not None:
            self.restarts(sequence, why, now)
            sequence.doom(why)
            sequence.hold(False)
            self._state.ready.append(sequence)
        return mend is not None

    def leaving(self, sequence: ScheduledSequence) -> None:
        """Forget what is under way for a sequence that leaves its path: closing it there ends it."""
        self._end(sequence.waits.move)
        self._waiting.pop(sequence.seq, None)

    def held(self) -> Mapping[str, int]:
        """Return the pages taken for what is under way, by device."""
        pages: Counter[str] = Counter()
        for mend in self._under_way.values():
            pages.update(mend.pages())
        return pages

    def check(self) -> None:
        """Raise RuntimeError unless mends, losses and pages agree. For tests, after every event."""
        for mend in self._under_way.values():
            waits, mended = mend.sequence.waits, [each for each in mend.sequence.lost if mend.mends(each)]
            rests = waits.move == mend.number and (waits.held or waits.doomed) and not mend.sequence.flying
            if not rests or not mended or any(each.groups[1] < mend.groups[1] for each in mended):
                raise RuntimeError(
                    f"mend {mend.number} is of a sequence that does not rest, or of pages that are there"
                )
        for sequence in self._state.running.values():
            first = [hop.layers[0] for hop in sequence.path]
            lost = [(first[each.hop] + layer, at) for each in sequence.lost for layer, at in each.pages()]
            gone = self._state.page_accounting.lost_pages(sequence.pages.holding)
            if bool(lost) != sequence.waits.mends or len(lost) != len(gone) or set(lost) != gone:
                raise RuntimeError(f"{sequence.seq}: {sequence.lost} are not the page sets that are nowhere")

    # -- internals -----------------------------------------------------------------------------------------------------

    def _end(self, number: int) -> MendUnderWay | None:
        """Forget a mend that is under way, and give back the pages that are taken for it."""
        mend = self._under_way.pop(number, None)
        for name, pages in {} if mend is None else mend.pages().items():
            if (device := self._state.devices[name]).alive:
                device.pages.used -= pages
                self._state.changed = True
        return mend

    def _await_news(self, sequence: ScheduledSequence, now: int) -> None:
        sequence.hold(True)
        self._waiting[sequence.seq] = sequence, now

    def _trace(self, event: str, device: str, sequence: ScheduledSequence, now: int, **extra: Any) -> None:
        self._state.tell.control(now, event, "IL-18", device, seq=sequence.seq, **extra)
