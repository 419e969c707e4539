"""Bring page sets of running sequences back to their path (IL-25).

    start --StartMigration (recall)--> debtor --PageRequest (loan)--> creditor … MigrationReady
        -> no row of the sequence in flight -> FinishMigration: its own pages again; EndLoan to the creditor: free there

Contract:
- The sequence runs on, and its creditor attends for it, until the pages are at the debtor; it rests only for its row to
  return then.
- The debtor's pages are taken before they are requested. The creditor's are given back when the debtor's are in use.
- A recall that fails or is given up leaves the loan as it was.
- A loan may come back in parts: its last page sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.chains import Stage
from runtime.messages import EndLoan, FinishMigration, MigrationFailed, MigrationReady, StartMigration
from runtime.policy.lending.recalls import Debt, recalls
from runtime.policy.lending.shapes import cut_step, last_groups
from runtime.scheduler.lending.loans import Loan, LoanRecall, Loans
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Time in ns for which a debtor takes nothing back after a recall that failed.
_PAUSE = 1_000_000_000


class Recalls:
    """Start, complete and end recalls.

    Args:
        number: Returns the number of a new recall, of those of migrations.
        evict: Evicts one cached prefix from a device; returns whether there was one.
        go_on: Lets a sequence run that does not wait for a recall any more.
    """

    def __init__(
        self, state: ClusterState, loans: Loans, number: Callable[[], int], evict: Callable[[str], bool],
        go_on: Callable[[ScheduledSequence], None],
    ) -> None:  # fmt: skip
        self._state, self._loans, self._number, self._evict, self._go_on = state, loans, number, evict, go_on
        self._paused: dict[str, int] = {}
        #: Called with each recall that is complete.
        self.on_commit: Callable[[LoanRecall, int], None] = lambda recall, now: None

    # -- starting ------------------------------------------------------------------------------------------------------

    def start(self, loan: Loan, groups: int, now: int) -> LoanRecall | None:
        """Start to bring back the last `groups` page sets of a loan; None if that cannot be now."""
        state, sequence = self._state, loan.sequence
        if groups < 1 or not self.is_able(loan, now) or self.room(loan.debtor) < groups * loan.depth:
            return None
        debtor = state.devices[loan.debtor]
        while debtor.pages.free < groups * loan.depth:
            if not self._evict(loan.debtor):
                return None
        last = loan.groups[1]
        step = cut_step(sequence.spec.page_tokens, state.config.lending.cut_tokens)
        first = last_groups(loan.groups[0], last, groups, step)
        recall = LoanRecall(self._number(), loan, (first, last), now)
        self._loans.recalls[recall.number] = recall
        sequence.moves(recall.number)
        debtor.pages.used += recall.pages
        width = sequence.spec.page_tokens
        state.out.add_message(
            loan.debtor,
            StartMigration(
                recall.number, sequence.seq, sequence.epoch, Stage(sequence.chain.loaded_as, loan.hop.lo, loan.hop.hi),
                loan.chain_layers, width, loan.creditor, last * width, (), True, sequence.device_request,
                first=first * width, recall=loan.number, skipped=loan.layers[0],
            ),
        )  # fmt: skip
        self._trace("kv.recall.start", recall, now)
        return recall

    def is_able(self, loan: Loan, now: int) -> bool:
        """Return whether pages of a loan can come back now: it stands, and its sequence does not relocate."""
        sequence = loan.sequence
        return (
            loan.standing
            and not sequence.waits.move
            and not sequence.waits.doomed
            and not sequence.lost
            and sequence.swapped is None
            and self._state.devices.alive(loan.debtor)
            and self._state.devices.alive(loan.creditor)
            and self._paused.get(loan.debtor, 0) <= now
        )

    def room(self, device: str) -> int:
        """Return the pages that a device has for recalls: those that are free, and those that only prefixes use."""
        pages = self._state.devices[device].pages
        return pages.free + pages.idle

    def review(self, now: int) -> None:
        """Start the recalls of `policy.lending.recalls`: where a share of the debtor's pages stays free (IL-25)."""
        share = self._state.config.lending.recall
        if share >= 1 or not len(self._loans):
            return
        room = {
            each.name: self.room(each.name) - int(each.pages.capacity * share)
            for each in self._state.devices
            if each.alive
        }
        able = [loan for loan in self._loans if self.is_able(loan, now)]
        debts = [Debt(loan.number, loan.sequence.seq, loan.debtor, loan.creditor, loan.pages) for loan in able]
        for number in recalls(debts, room):
            if (loan := self._loans.get(number)) is not None:
                self.start(loan, loan.groups[1] - loan.groups[0], now)

    def reclaim(self, creditor: str, now: int) -> bool:
        """Return whether pages are on their way from a device that needs them to a debtor that has room (IL-18)."""
        if not self._state.config.lending.reclaim:
            return False
        here = [loan for loan in self._loans if loan.creditor == creditor]
        if any(each.loan.creditor == creditor for each in self._loans.recalls.values()):
            return True
        for loan in here:
            groups = min(loan.groups[1] - loan.groups[0], self.room(loan.debtor) // loan.depth)
            if self.start(loan, groups, now) is not None:
                return True
        return False

    # -- answers -------------------------------------------------------------------------------------------------------

    def arrived(self, event: MigrationReady, now: int) -> bool:
        """Complete a recall of which the debtor has the pages; return whether the answer is that of a recall."""
        recall = self._loans.recalls.get(event.move)
        if recall is None:
            return False
        recall.arrived, recall.nbytes = True, event.nbytes
        sequence = recall.loan.sequence
        if sequence.flying:
            sequence.hold(True)
        else:
            self._state.starved.pop(sequence.seq, None)
            self._commit(recall, now)
        return True

    def refused(self, event: MigrationFailed, now: int) -> bool:
        """End a recall that the debtor gives up; return whether the answer is that of a recall."""
        recall = self._loans.recalls.get(event.move)
        if recall is None:
            return False
        self._paused[recall.loan.debtor] = now + _PAUSE
        self._end(recall, event.reason, now)
        return True

    def at_rest(self, sequence: ScheduledSequence, now: int) -> None:
        """Complete a recall of which the pages have arrived, if no row of its sequence is in flight."""
        recall = self._loans.recall_of(sequence)
        if recall is not None and recall.arrived and not sequence.flying:
            self._commit(recall, now)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def give_up(self, sequence: ScheduledSequence, why: str, now: int) -> bool:
        """End the recall of a sequence; return whether there was one. Its loan stays."""
        recall = self._loans.recall_of(sequence)
        if recall is None:
            return False
        self._paused[recall.loan.debtor] = now + _PAUSE
        if self._state.devices.alive(recall.loan.debtor):
            self._settle(recall, commit=False)
        self._end(recall, why, now)
        return True

    def leaving(self, sequence: ScheduledSequence) -> None:
        """Forget the recall of a sequence that leaves its path: closing it there ends it."""
        recall = self._loans.recall_of(sequence)
        if recall is not None:
            self._release(recall)
        self._loans.came_back.pop(sequence.seq, None)

    def check(self) -> None:
        """Raise RuntimeError unless recalls, loans and sequences agree. For tests, after every event."""
        for recall in self._loans.recalls.values():
            loan, sequence = recall.loan, recall.loan.sequence
            if self._loans.get(loan.number) is not loan or sequence.waits.move != recall.number or not loan.standing:
                raise RuntimeError(
                    f"recall {recall.number} is of a loan that does not stand, or its sequence knows none"
                )

    # -- internals -----------------------------------------------------------------------------------------------------

    def _commit(self, recall: LoanRecall, now: int) -> None:
        """Make pages that are at the debtor those of the sequence, and free the creditor's."""
        state, loan, sequence = self._state, recall.loan, recall.loan.sequence
        counters, (first, last) = state.counters, recall.groups
        counters.loan_recalls += 1
        counters.recalled_pages += recall.pages
        self._trace("kv.recall", recall, now, bytes=recall.nbytes)
        self._settle(recall, commit=True)
        upto = first * sequence.spec.page_tokens
        state.out.add_message(loan.creditor, EndLoan(sequence.seq, sequence.epoch, loan.number, upto))
        self._release(recall)
        state.page_accounting.change_place(sequence.pages.holding, loan.debtor, loan.debtor, first, last, loan.layers)
        loan.groups = loan.groups[0], first
        if loan.groups[0] == loan.groups[1]:
            self._loans.remove(loan)
            sequence.lenders = frozenset(each.creditor for each in self._loans.of_sequence(sequence))
        self._loans.came_back[sequence.seq] = sequence.computed
        self._go_on(sequence)
        self.on_commit(recall, now)

    def _end(self, recall: LoanRecall, why: str, now: int) -> None:
        self._release(recall)
        self._trace("kv.recall.none", recall, now, why=why)
        self._go_on(recall.loan.sequence)

    def _settle(self, recall: LoanRecall, commit: bool) -> None:
        sequence = recall.loan.sequence
        end = FinishMigration(recall.number, sequence.seq, sequence.epoch, commit)
        self._state.out.add_message(recall.loan.debtor, end)

    def _release(self, recall: LoanRecall) -> None:
        """Give back the pages that are taken for a recall."""
        device = self._state.devices[recall.loan.debtor]
        if device.alive:
            device.pages.used -= recall.pages
            self._state.changed = True
        del self._loans.recalls[recall.number]

    def _trace(self, event: str, recall: LoanRecall, now: int, **extra: Any) -> None:
        loan = recall.loan
        self._state.tell.control(
            now, event, "IL-25", loan.debtor, seq=loan.sequence.seq, creditor=loan.creditor, loan=loan.number,
            recall=recall.number, groups=list(recall.groups), pages=recall.pages, **extra,
        )  # fmt: skip
