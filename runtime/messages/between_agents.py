"""Define the messages between agents: hidden states, pages of K and V, offers and bids of hops, attention to loans."""

from __future__ import annotations

from runtime.loans import LoanQuery
from runtime.messages.base import Message


class PageRequest(Message, frozen=True, tag=True, array_like=True):
    """Request pages of K and V, or cached hidden states, from the source of a migration (destination to source).

    The source answers with exactly one PageData, or if `as_written` with one for each run of layers.

    Fields:
        move: Number of the migration.
        layers: Attention layers [first, last) of the chain.
        lo, hi: Token range [lo, hi); whole page sets.
        by: Device of the destination, to which the answer goes.
        before: 0 requests pages; n requests the hidden states that entered the stage that begins with component n.
        loan: The loan of which pages are requested; 0: none, but pages of the sequence's path.
        as_written: Whether the pages may not be written yet. Then those of each layer are sent once they are (TI-15).
    """

    move: int
    seq: str
    epoch: int
    layers: tuple[int, int]
    lo: int
    hi: int
    by: str
    before: int = 0
    loan: int = 0
    as_written: bool = False


class PageData(Message, frozen=True, tag=True, array_like=True):
    """Answer a PageRequest with one array of K and V or hidden states, or with an error (source to destination).

    Fields:
        lo, hi: Token range [lo, hi); the array holds the pages of all its page sets.
        digest: BLAKE3 of the bytes. For an array sent directly from device to device: a checksum computed on its
            device.
        error: Why the source cannot send the array; empty if it does.
        before: As in PageRequest. If not 0, the array is hidden states [hi - lo, width].
        kept: Token ranges of which the source has hidden states, in an answer to a request for hidden states.
        layers: Attention layers [first, last) of the chain that the array has the pages of; (0, 0): all requested ones.
            They come in order, without gaps.
    """

    move: int
    seq: str
    epoch: int
    lo: int
    hi: int
    digest: str
    error: str = ""
    before: int = 0
    kept: tuple[tuple[int, int], ...] = ()
    layers: tuple[int, int] = (0, 0)


class ForwardRows(Message, frozen=True, tag=True, array_like=True):
    """Send rows to the next hop of their paths, with their hidden states in the arrays.

    The arrays are [tokens, width]; the rows lie back to back, and each array holds one row or several.

    Fields:
        hops: Index into each row's path of the hop that runs now.
        starts: Position of each row's first token.
        counts: Tokens of each row.
        sample: Whether the last hop samples a token after the row's last position.
        generated: Tokens that the sequence has produced so far.
        attempts: As in RunRows. An odd attempt is a tentative prediction of the row with the next even attempt (BL-25).
        speculate: As in RunRows.
        batch: As in RunRows.
        sent: Time on the sender's clock in ns at which the rows left; 0 if it does not matter.
    """

    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    sample: tuple[bool, ...]
    generated: tuple[int, ...]
    attempts: tuple[int, ...] = ()
    speculate: tuple[bool, ...] = ()
    batch: int = 0
    sent: int = 0


class Offer(Message, frozen=True, tag=True, array_like=True):
    """Offer hops of these sequences to several agents that can run them (BL-23). `device` holds the rows.

    Fields:
        hops: Index of the offered hop in each sequence's path.
        counts: Tokens of each row.
    """

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]
    counts: tuple[int, ...]


class Bid(Message, frozen=True, tag=True, array_like=True):
    """Bid for offered hops on behalf of `device`.

    The offering agent sends the rows of each hop that is not yet assigned as ForwardRows; a bid that loses gets no
    answer.
    """

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]


class Retract(Message, frozen=True, tag=True, array_like=True):
    """Withdraw offered hops, because another agent got them."""

    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]


class AttendLoans(Message, frozen=True, tag=True, array_like=True):
    """Ask a creditor for attention to K and V that it holds, with the queries as array (debtor to creditor, IL-27).

    It goes over the side link and gets exactly one LoansAttended, in order. `turn`: how often the debtor has given up
    what was under way, so that it knows late answers. So the message is the same in each step, and is decoded once.
    """

    turn: int
    query: LoanQuery


class LoansAttended(Message, frozen=True, tag=True, array_like=True):
    """Answer AttendLoans: attention, its sums and exponents as arrays, or the error why there are none."""

    turn: int
    error: str = ""
