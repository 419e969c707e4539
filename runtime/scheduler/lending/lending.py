"""Lend page sets of running sequences: a device without free pages keeps the latest ones, another one holds the rest.

    no page for the next row of a sequence -> make_room: StartMigration (a loan) to a creditor; the sequence rests
        -> MigrationReady: all pages lie there -> SendAway to the debtor: its own copies are free -> the row goes
    the sequence leaves its path (end, abort, preemption, death) -> CloseSequences to its creditors, too

Contract:
- Only full page sets that no other sequence shares are lent, the first ones first: a lent page is never written again,
  and what a sequence writes is always on its path (IL-04). Where a hop is predicted, they are lent between rows: what
  was written from a wrong token lies behind them (BL-25), and the stand-in's own pages are never lent.
- A creditor has the pages before the debtor's are given up, so that the sequence can be computed at any time.
- A creditor never borrows for a loan (IL-07): pages that it has not free are not lent. Its own sequences take pages
  from loans by rank, as from any sequence there (`debtors`).
- One relocation of a sequence at a time: one that lends does not migrate, is not swapped to host memory, and shares
  no prefix.
- Pages are given back when the sequence leaves its path, or come back before (`recalls`, `circles`). What a creditor
  held that dies is computed again (`mending`), or the sequence runs again from its tokens (IL-18).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from runtime.chains import Hop, Stage
from runtime.kv.pages import groups_for
from runtime.lending_config import LoanShape
from runtime.messages import MigrationFailed, MigrationReady, SendAway, StartMigration
from runtime.policy.lending.creditors import Creditor, choose
from runtime.policy.lending.shapes import LoanPiece, PageRectangle, cheaper_shape, cut_step, pieces
from runtime.scheduler.lending.circles import Circles
from runtime.scheduler.lending.loans import Loan, Loans
from runtime.scheduler.lending.mending import Mending
from runtime.scheduler.lending.negotiation import LoanWish, Negotiations
from runtime.scheduler.lending.recalls import Recalls
from runtime.scheduler.sequences.parts import Weights
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Time in ns for which a device that has refused a loan is not asked again (IL-14).
_PAUSE = 100_000_000


class Lending:
    """Start, complete and end loans.

    Args:
        number: Returns the number of a new loan, of those of migrations.
        hide: Removes a sequence from the prefix index.
        evict: Evicts one cached prefix from a device; returns whether there was one.
    """

    def __init__(
        self, state: ClusterState, number: Callable[[], int], hide: Callable[[ScheduledSequence], None],
        evict: Callable[[str], bool],
    ) -> None:  # fmt: skip
        self._state, self._number, self._hide = state, number, hide
        self._paused: dict[str, int] = {}
        self.loans = Loans()
        self.recalls = Recalls(state, self.loans, number, evict, self._go_on)
        self.circles = Circles(state, self.loans, self.recalls)
        self.mending = Mending(state, self.loans, number, self._go_on)
        self.config = state.config.lending
        hooks = (self._creditor, self._grant, self._go_on)
        self.talks = Negotiations(state, number, *hooks) if self.config.mode == "negotiated" else None

    # -- room ----------------------------------------------------------------------------------------------------------

    def make_room(self, sequence: ScheduledSequence, device: str, pages: int, now: int) -> bool:
        """Start a loan of a sequence's own page sets that makes room for so many more of its pages on a device.

        Returns whether one is on its way: the sequence rests until it stands, and asks again.
        """
        state = self._state
        if not state.limits.on or not state.devices[device].lends:
            return False
        self.recalls.give_up(sequence, "its device has no room for it any more", now)
        if (hop := self._hop(sequence, device)) is None:
            return False
        wanted = self._pieces(sequence, hop, pages)
        if self.talks is not None and wanted:
            need = state.devices[device].pages.free + pages
            piece = wanted[-1 if self.talks.is_in_vain(sequence) else 0]
            return self.talks.begin(LoanWish(sequence, device, hop, pages, need, piece), now)
        creditors = self._creditors(sequence, device, now) if wanted else []
        for piece in wanted:
            found = choose(creditors, self.config.busy, piece.most, piece.unit)
            if found is not None:
                self._start(sequence, hop, found[0], piece.first(found[1]), now)
                return True
        return False

    def is_needed(self, sequence: ScheduledSequence, weights: Weights) -> bool:
        """Return whether a path holds a sequence's context only with loans."""
        limits, spec = self._state.limits, sequence.chain.spec
        path = [name for name, _ in weights]
        return limits.takes(spec, path) and groups_for(spec, sequence.tokens) > limits.local(weights)

    def has_room(self, sequence: ScheduledSequence, weights: Weights, groups: int, now: int) -> bool:
        """Return whether a path and the devices beside it have pages now for what a sequence needs behind `groups`.

        A sequence that has searched for creditors in vain waits until it may ask again.
        """
        if self.talks is not None and self.talks.rests(sequence, now):
            return False
        devices, on_path = self._state.devices, {name for name, _ in weights}
        pages = (groups_for(sequence.chain.spec, sequence.tokens) - groups) * sum(each for _, each in weights)
        free = sum(devices[name].pages.free - each * groups for name, each in weights)
        names = [each.name for each in devices if each.name not in on_path]
        return pages <= self._state.limits.spare(names, self.loans.lent()) + max(0, free)

    def review(self, now: int) -> None:
        """Bring pages back: those that fit, and those of circles of debts; end queries without an answer."""
        if self.talks is not None:
            self.talks.review(now)
        self.mending.review(now)
        if len(self.loans):
            self.recalls.review(now)
            self.circles.review(now)

    def asks_soon(self, sequences: Iterable[ScheduledSequence], now: int) -> bool:
        """Return whether each of these is about to ask for a loan again, and keeps its pages meanwhile."""
        return all(
            self.mending.awaits_device(each, now) or (self.talks is not None and self.talks.asks_soon(each))
            for each in sequences
        )

    def debtors(self, device: str) -> list[ScheduledSequence]:
        """Return the sequences with standing loans on a device."""
        return list({id(loan.sequence): loan.sequence for loan in self.loans if loan.creditor == device}.values())

    # -- answers -------------------------------------------------------------------------------------------------------

    def held(self, event: MigrationReady, now: int) -> bool:
        """Complete a loan that its creditor has, or a recall; return whether the answer is that of one."""
        loan = self.loans.get(event.move)
        if loan is None:
            return self.recalls.arrived(event, now) or self.mending.arrived(event, now)
        if not loan.standing:
            sequence, counters = loan.sequence, self._state.counters
            self._release(loan)
            loan.standing = True
            self._state.page_accounting.change_place(
                sequence.pages.holding, loan.debtor, loan.creditor, *loan.groups, loan.layers
            )
            self._state.out.add_message(loan.debtor, self._away_message(loan))
            counters.loans += 1
            counters.loan_pages += loan.pages
            counters.loan_bytes += event.nbytes
            counters.loan_ns += now - loan.began
            if self.talks is not None:
                self.talks.granted(sequence, now)
            self._trace("kv.lend", loan, now)
            self._go_on(sequence)
        return True

    def refused(self, event: MigrationFailed, now: int) -> bool:
        """End a loan that its creditor cannot take, or a recall; return whether the answer is that of one."""
        loan = self.loans.get(event.move)
        if loan is None:
            return self.recalls.refused(event, now) or self.mending.refused(event, now)
        self._paused[loan.creditor] = now + _PAUSE
        self._drop_loan(loan, event.reason, now)
        if self.talks is None:
            self._go_on(loan.sequence)
        else:
            self.talks.denied(loan.sequence, event.reason, now)
        return True

    # -- ends ----------------------------------------------------------------------------------------------------------

    def lose(self, sequence: ScheduledSequence, device: str, now: int) -> bool:
        """Record that a device has died that held pages of a sequence, or was about to.

        Returns False if the sequence has to run again from its tokens.
        """
        why = f"{device} is gone"
        if cause := self.mending.why_not(sequence):
            self.mending.restarts(sequence, cause, now)
            return False
        self.recalls.give_up(sequence, why, now)
        for loan in [each for each in self.loans.of_sequence(sequence) if not each.standing]:
            if loan.creditor == device:
                self._drop_loan(loan, why, now)
                if self.talks is not None:
                    self.talks.unheard(sequence, why, now)
                self._go_on(sequence)
        self.mending.lose(sequence, device, now)
        return True

    def leaving(self, sequence: ScheduledSequence) -> None:
        """End all loans of a sequence that leaves its path, before its pages are given back."""
        self.recalls.leaving(sequence)
        self.mending.leaving(sequence)
        if self.talks is not None:
            self.talks.remove_sequence(sequence)
        for loan in list(self.loans.of_sequence(sequence)):
            if not loan.standing:
                self._release(loan)
            self.loans.remove(loan)
            if self._state.devices.alive(loan.creditor):
                self._state.out.close(loan.creditor, sequence.seq, sequence.epoch)
        sequence.lenders = frozenset()

    def give_up(self, sequence: ScheduledSequence, why: str, now: int) -> None:
        """End a loan or recall on its way of which nothing is heard; the sequence asks another device."""
        if self.recalls.give_up(sequence, why, now) or self.mending.give_up(sequence, why, now):
            return
        for loan in [each for each in self.loans.of_sequence(sequence) if not each.standing]:
            self._paused[loan.creditor] = now + _PAUSE
            # Closed there: the loans that stand would be, too, so that the sequence is computed again.
            if any(each.standing and each.creditor == loan.creditor for each in self.loans.of_sequence(sequence)):
                sequence.doom(why)
            elif self._state.devices.alive(loan.creditor):
                self._state.out.close(loan.creditor, sequence.seq, sequence.epoch)
            self._drop_loan(loan, why, now)
            if self.talks is not None:
                self.talks.unheard(sequence, why, now)
            self._go_on(sequence)

    def targets(self, sequence: ScheduledSequence) -> tuple[str, ...]:
        """Return the devices of which an answer is awaited."""
        if (recall := self.loans.recall_of(sequence)) is not None:
            return (recall.loan.debtor,)
        return tuple(loan.creditor for loan in self.loans.of_sequence(sequence) if not loan.standing)

    def on_their_way(self) -> Mapping[str, int]:
        """Return the pages taken for what is on its way, by device."""
        return Counter(self.loans.held()) + Counter(self.mending.held())

    def check(self) -> None:
        """Raise RuntimeError unless loans and sequences agree. For tests, after every event."""
        self.recalls.check()
        self.mending.check()
        for loan in self.loans:
            sequence = loan.sequence
            if self._state.running.get(sequence.seq) is not sequence or loan.creditor not in sequence.lenders:
                raise RuntimeError(f"loan {loan.number} is of a sequence that does not run, or knows nothing of it")
            if not loan.standing and not (sequence.waits.held and sequence.waits.move == loan.number):
                raise RuntimeError(f"loan {loan.number} is on its way, and its sequence does not rest")
        if self.talks is not None:
            self.talks.check()
        for device, pages in self.loans.lent().items():
            if pages > self._state.limits.most(device):
                raise RuntimeError(f"{device} lends {pages} pages, of {self._state.limits.most(device)}")

    # -- internals -----------------------------------------------------------------------------------------------------

    def _hop(self, sequence: ScheduledSequence, device: str) -> Hop | None:
        """Return the hop of a sequence on a device that can lend; None if it has none, or rests for something else."""
        spec, waits = sequence.spec, sequence.waits
        if (
            not (sequence.lenders or self._state.limits.takes(spec, sequence.place.devices))
            or sequence.swapped is not None
            or sequence.flying
            or waits.move
            or waits.doomed
        ):
            return None
        hops = [hop for hop in sequence.path if hop.device == device and hop.layers[1] > hop.layers[0]]
        return hops[0] if len(hops) == 1 else None

    def _pieces(self, sequence: ScheduledSequence, hop: Hop, need: int) -> list[LoanPiece]:
        """Return what a sequence can lend of a hop to make room for so many pages, the best first."""
        state, spec = self._state, sequence.spec
        full = (sequence.computed - 1) // spec.page_tokens  # its device has the page set of the latest token
        here = [
            each._replace(groups=(each.groups[0], min(each.groups[1], full)))
            for each in state.page_accounting.lendable(
                sequence.pages.holding, hop.device, hop.layers[1] - hop.layers[0]
            )
        ]
        coming = groups_for(spec, sequence.tokens) - sequence.pages.groups
        room = state.devices[hop.device].pages.free + sum(each.pages for each in here)
        return pieces(
            self._shape(sequence), here, need, coming, room, cut_step(spec.page_tokens, self.config.cut_tokens)
        )

    def _shape(self, sequence: ScheduledSequence) -> LoanShape:
        """Return the shape of a sequence's loans, the same for all while it is on a path."""
        if len(sequence.path) != 1 or sequence.spec.kv_layers < 2:
            return "tokens"
        if self.config.shape != "cheapest":
            return self.config.shape
        page = self._state.devices[sequence.path[0].device].pages.page_bytes
        return cheaper_shape(sequence.longest * page, int(self.config.layer_mib * (1 << 20)))

    def _creditors(self, sequence: ScheduledSequence, debtor: str, now: int) -> list[Creditor]:
        able = (each.name for each in self._state.devices if self._paused.get(each.name, 0) <= now)
        lent = self.loans.lent()
        found = (self._creditor(sequence, debtor, name, lent) for name in able)
        return [each for each in found if each is not None]

    def _creditor(
        self, sequence: ScheduledSequence, debtor: str, name: str, lent: Mapping[str, int] | None = None
    ) -> Creditor | None:
        """Return a device's own account as a creditor; None if it can be none of this sequence."""
        state, each = self._state, self._state.devices.get(name)
        if each is None or not each.alive or not each.lends or name in sequence.place.devices:
            return None
        return Creditor(
            name,
            each.pages.free,
            (self.loans.lent() if lent is None else lent)[name],
            state.limits.most(name),
            each.passing.expected / state.config.max_num_seqs,
            each.facts.server == state.devices[debtor].facts.server,
            state.devices.roles[name].decodes,
        )

    def _grant(self, wish: LoanWish, creditor: str, units: int, now: int) -> int:
        """Start the loan of a sequence that a creditor grants; return its number, 0 if it has nothing to lend now."""
        sequence = wish.sequence
        for piece in self._pieces(sequence, wish.hop, wish.pages):
            if (piece.by_layers, piece.unit) == (wish.piece.by_layers, wish.piece.unit):
                self._start(sequence, wish.hop, creditor, piece.first(units), now)
                return sequence.waits.move
        return 0

    def _start(self, sequence: ScheduledSequence, hop: Hop, creditor: str, pages: PageRectangle, now: int) -> None:
        state, width, (first, last) = self._state, sequence.spec.page_tokens, pages.groups
        loan = Loan(self._number(), sequence, hop, creditor, pages.groups, pages.layers, now)
        self.loans.add(loan)
        sequence.lenders |= {creditor}
        self._hide(sequence)
        sequence.moves(loan.number)
        sequence.hold(True)
        state.devices[creditor].pages.used += loan.pages
        state.out.add_message(
            creditor,
            StartMigration(
                loan.number, sequence.seq, sequence.epoch, Stage(sequence.chain.loaded_as, hop.lo, hop.hi),
                loan.chain_layers, width, hop.device, last * width, (), True, sequence.device_request,
                first=first * width, loan=True, skipped=loan.layers[0],
            ),
        )  # fmt: skip
        self._trace("kv.lend.start", loan, now)

    def _away_message(self, loan: Loan) -> SendAway:
        width, sequence = loan.sequence.spec.page_tokens, loan.sequence
        first, last = (each * width for each in loan.groups)
        return SendAway(sequence.seq, sequence.epoch, loan.hop.lo, loan.number, loan.creditor, first, last, loan.layers)

    def _release(self, loan: Loan) -> None:
        """Give back the pages that are taken for a loan on its way."""
        device = self._state.devices[loan.creditor]
        if device.alive:
            device.pages.used -= loan.pages
            self._state.changed = True

    def _drop_loan(self, loan: Loan, why: str, now: int) -> None:
        """Forget a loan on its way, as if it had not been asked for; its sequence still rests."""
        sequence = loan.sequence
        if not loan.standing:
            self._release(loan)
        self.loans.remove(loan)
        sequence.lenders = frozenset(each.creditor for each in self.loans.of_sequence(sequence))
        self._state.counters.loans_refused += 1
        self._trace("kv.lend.none", loan, now, why=why)

    def _go_on(self, sequence: ScheduledSequence) -> None:
        sequence.hold(False)
        sequence.moves(0)
        self._state.ready.append(sequence)
        self._state.changed = True

    def _trace(self, event: str, loan: Loan, now: int, **extra: str) -> None:
        some: dict[str, Any] = {} if loan.is_of_all_layers else {"layers": list(loan.layers)}
        self._state.tell.control(
            now, event, "IL-12", loan.creditor, seq=loan.sequence.seq, debtor=loan.debtor, loan=loan.number,
            groups=list(loan.groups), pages=loan.pages, **some, **extra,
        )  # fmt: skip
