"""Records of loans: which page sets of which sequence lie on which device, and which are on their way.

Contract: `Loans` holds each loan from its request to the end of its sequence's placement. Pages of a loan that is on
its way count here (`held`); once they lie at the creditor they count in the sequence's holding
(`PageAccounting.lend`). It decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from runtime.chains import Hop
from runtime.scheduler.sequences.sequence import ScheduledSequence


@dataclass(slots=True)
class Loan:
    """Pages of one hop of a sequence on another device.

    Fields:
        number: Its number in messages, unique among those of migrations.
        hop: The hop on the debtor: device, components, layers.
        groups: Page sets [first, last), counted from the sequence's first.
        layers: Of these layers [first, last), counted from the hop's first.
        began: Time of the request in ns.
        standing: Whether the creditor has them, and the debtor does not any more.
    """

    number: int
    sequence: ScheduledSequence
    hop: Hop
    creditor: str
    groups: tuple[int, int]
    layers: tuple[int, int]
    began: int
    standing: bool = False

    @property
    def debtor(self) -> str:
        return self.hop.device

    @property
    def depth(self) -> int:
        """Its pages in a page set."""
        return self.layers[1] - self.layers[0]

    @property
    def chain_layers(self) -> tuple[int, int]:
        """Its layers, counted from the chain's first."""
        return self.hop.layers[0] + self.layers[0], self.hop.layers[0] + self.layers[1]

    @property
    def is_of_all_layers(self) -> bool:
        return self.chain_layers == self.hop.layers

    @property
    def pages(self) -> int:
        return self.depth * (self.groups[1] - self.groups[0])


@dataclass(slots=True)
class LoanRecall:
    """The last page sets of a loan on their way back (IL-25).

    Fields:
        number: Its number in messages, unique among those of loans and migrations.
        groups: Page sets [first, last), counted from the sequence's first.
        arrived: Whether they are at the debtor, where they count once no row of the sequence is in flight.
        nbytes: Bytes that came.
    """

    number: int
    loan: Loan
    groups: tuple[int, int]
    began: int
    arrived: bool = False
    nbytes: int = 0

    @property
    def pages(self) -> int:
        return self.loan.depth * (self.groups[1] - self.groups[0])


class Loans:
    """All loans, by number and by sequence; the recalls under way, by number.

    Attributes:
        came_back: By sequence: the tokens that it had computed when pages of it came back last.
    """

    def __init__(self) -> None:
        self._loans: dict[int, Loan] = {}
        self.recalls: dict[int, LoanRecall] = {}
        self.came_back: dict[str, int] = {}
        self._of: dict[str, list[Loan]] = {}

    def __len__(self) -> int:
        return len(self._loans)

    def __iter__(self) -> Iterator[Loan]:
        return iter(self._loans.values())

    def get(self, number: int) -> Loan | None:
        return self._loans.get(number)

    def of_sequence(self, sequence: ScheduledSequence) -> list[Loan]:
        """Return the loans of a sequence, the first page sets first."""
        return self._of.get(sequence.seq, [])

    def add(self, loan: Loan) -> None:
        self._loans[loan.number] = loan
        self._of.setdefault(loan.sequence.seq, []).append(loan)

    def remove(self, loan: Loan) -> None:
        del self._loans[loan.number]
        left = self._of[loan.sequence.seq]
        left.remove(loan)
        if not left:
            del self._of[loan.sequence.seq]

    def held(self) -> Mapping[str, int]:
        """Return the pages taken for what is on its way: of loans by creditor, of recalls by debtor."""
        pages: Counter[str] = Counter()
        for loan in self:
            if not loan.standing:
                pages[loan.creditor] += loan.pages
        for recall in self.recalls.values():
            pages[recall.loan.debtor] += recall.pages
        return pages

    def recall_of(self, sequence: ScheduledSequence) -> LoanRecall | None:
        """Return the recall of a sequence's pages that is under way."""
        return self.recalls.get(sequence.waits.move)

    def lent(self) -> Counter[str]:
        """Return the pages of all loans, by creditor."""
        pages: Counter[str] = Counter()
        for loan in self:
            pages[loan.creditor] += loan.pages
        return pages

    def debts(self) -> Mapping[tuple[str, str], int]:
        """Return the pages of all loans, by debtor and creditor (IL-11)."""
        pages: Counter[tuple[str, str]] = Counter()
        for loan in self:
            pages[loan.debtor, loan.creditor] += loan.pages
        return pages
