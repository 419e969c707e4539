"""Define what engines that lend each other pages exchange: queries of a layer, and the link that carries them (IL-27).

Depends neither on tensors nor on transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec
from msgspec import structs

from runtime.chains import Array
from runtime.lending_config import LoanShipping
from runtime.types import PlaceChange, SentAway


class LoanQuery(msgspec.Struct, frozen=True, array_like=True):
    """Ask for attention to K and V that a device holds for another one: the queries of one layer (IL-27).

    Queries come beside it, [tokens, heads, head_dim], rows back to back. All lent tokens come before all queries.

    Fields:
        loans: The loans of each row, the first tokens first.
        tokens: How many of the first tokens of each of these count: its last ones may just have come back (IL-25).
        counts: Query tokens of each row.
        layer: Attention layer, counted from the first one of the debtor's hop.
        kv_heads: Heads of K and V.
        dtype: Type of K and V.
        scaling: Factor on the logits; 0: 1 / sqrt(head_dim).
        softcap: Soft cap on the logits; 0: none.
        pull: Ask for the pages instead, without queries: uint8 [pages, bytes of a page], rows back to back (IL-28).
    """

    loans: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    layer: int
    kv_heads: int = 1
    dtype: str = ""
    scaling: float = 0.0
    softcap: float = 0.0
    pull: bool = False


def with_change(away: Sequence[SentAway], change: PlaceChange) -> tuple[SentAway, ...]:
    """Return what other devices hold of a sequence after a change, the first tokens first."""
    if isinstance(change, SentAway):
        return tuple(sorted((*away, change), key=_in_order))
    kept = [each for each in away if each.loan != change.loan]
    for each in away:
        if each.loan == change.loan:
            kept += [structs.replace(each, last=change.first), structs.replace(each, first=change.last)]
    return tuple(sorted((each for each in kept if each.first < each.last), key=_in_order))


def _in_order(away: SentAway) -> tuple[int, int]:
    return away.first, away.layers[0]


class LoanLink(Protocol):
    """Reach the devices that hold pages for an engine. Called in its steps."""

    def send_query(self, creditor: str, query: LoanQuery, arrays: tuple[Array, ...]) -> int:
        """Send a query and return its ticket. Raises `runtime.types.LoanLost`."""
        ...

    def collect(self, ticket: int) -> tuple[Array, ...]:
        """Wait for the answer to a query. Raises `runtime.types.LoanLost`, also if it does not come in time."""
        ...


@runtime_checkable
class LoanEngine(Protocol):
    """Define an engine that attends to K and V on other devices, and for them."""

    def borrow(self, link: LoanLink, shipping: LoanShipping = "query") -> None:
        """Reach creditors over this link from now on. Call it once, before any step. `shipping`: what travels."""
        ...

    def hold_loan(self, loan: int, groups: Sequence[Sequence[int]], tokens: int, first_layer: int = 0) -> None:
        """Attend for a loan from now on: page sets with K and V of so many tokens, all of them full.

        `first_layer`: the loan's first layer, counted from the first one of the debtor's hop.
        """
        ...

    def drop_loan(self, loan: int) -> None: ...

    def attend_loans(self, query: LoanQuery, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return attention to lent tokens, its sums and exponents: [tokens, heads, head_dim], [tokens, heads, 2].

        Of a query with `pull`, the pages.

        From a thread of its own, while steps run. Raises `runtime.types.LoanLost` for an unknown loan, ValueError for a
        query of another shape.
        """
        ...
