"""Loans of the integer engine (IL-01): sums over tokens of which another device has the pages, and for other devices.

What a layer attends to is the sum of (q + 1) (k_q + v_q) over all positions q. A creditor does not know where its
tokens begin, so it answers with two numbers: the sum with positions counted from its first token, and the plain sum.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from runtime.chains import Array
from runtime.loans import LoanLink, LoanQuery, with_change
from runtime.types import LoanLost, PlaceChange, SentAway

#: Returns the sum of (position + 1) (k + v) and the plain sum over all tokens of these pages, in order.
Sums = Callable[[Sequence[int]], tuple[int, int]]


class IntegerLoans:
    """What one engine holds for other devices, and what these hold for it."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._held: dict[int, tuple[Sequence[Sequence[int]], int, str, int]] = {}
        self._away: dict[str, tuple[SentAway, ...]] = {}
        self.link: LoanLink | None = None

    def change_place(self, one: PlaceChange) -> None:
        self._away[one.seq] = with_change(self._away.get(one.seq, ()), one)

    def is_away(self, seq: str, token: int, layer: int) -> bool:
        """Return whether another device has K and V of a token in a layer."""
        return any(_has(one, layer) and one.first <= token < one.last for one in self._away.get(seq, ()))

    def forget_sequence(self, seq: str) -> None:
        self._away.pop(seq, None)

    def past(self, seq: str, layer: int) -> int:
        """Return the sum over the tokens of a sequence that are away in a layer. Raises LoanLost."""
        total = 0
        for one in (each for each in self._away.get(seq, ()) if _has(each, layer)):
            if self.link is None:
                raise LoanLost("there is no link to the creditors")
            ticket = self.link.send_query(
                one.creditor, LoanQuery(((one.loan,),), ((one.last - one.first,),), (1,), layer), ()
            )
            (answer,) = self.link.collect(ticket)
            weighted, plain = memoryview(answer.data).cast("B").cast("q")
            total += weighted + one.first * plain
        return total

    def hold_loan(self, loan: int, groups: Sequence[Sequence[int]], tokens: int, debtor: str, first_layer: int) -> None:
        self._held[loan] = groups, tokens, debtor, first_layer

    def drop_loan(self, loan: int) -> None:
        self._held.pop(loan, None)

    def attend(self, query: LoanQuery, debtor: str) -> tuple[Array, ...]:
        """Return the sums of each row's loan, int64 [rows, 2]. Raises LoanLost."""
        numbers = array("q")
        for (loan,), (tokens,) in zip(query.loans, query.tokens, strict=True):
            groups, held, owner, first = self._held.get(loan, ((), 0, "", 0))
            if tokens > held or owner != debtor:
                raise LoanLost(f"loan {loan} is not held here")
            some = groups[: tokens * len(groups) // held]
            numbers.extend(self._sums([group[query.layer - first] for group in some]))
        return (Array("int64", (len(query.loans), 2), numbers.tobytes()),)


def _has(one: SentAway, layer: int) -> bool:
    return one.layers[0] <= layer < one.layers[1]
