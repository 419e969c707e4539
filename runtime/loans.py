"""Define what engines that lend each other pages exchange: queries of a layer, and the link that carries them (IL-27).

Depends neither on tensors nor on transports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
from msgspec import structs

from runtime.chains import Array
from runtime.lending_config import LoanShipping
from runtime.types import PlaceChange, SentAway

#: Most bytes of a message without its arrays that native code exchanges (`MOST_HEAD` in csrc/exchange.c).
MOST_HEAD_BYTES = 1024


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

    def hold_loan(
        self, loan: int, groups: Sequence[Sequence[int]], tokens: int, debtor: str, first_layer: int = 0
    ) -> None:
        """Attend for a loan from now on: page sets with K and V of so many tokens, all of them full.

        `debtor`: the device that may ask. `first_layer`: the loan's first layer, counted from the first one of the
        debtor's hop.
        """
        ...

    def drop_loan(self, loan: int) -> None: ...

    def attend_loans(self, query: LoanQuery, arrays: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        """Return attention to lent tokens, its sums and exponents: [tokens, heads, head_dim], [tokens, heads, 2].

        Of a query with `pull`, the pages. `debtor`: the device that asks.

        From a thread of its own, while steps run. Raises `runtime.types.LoanLost` for an unknown loan, or one of
        another debtor, ValueError for a query of another shape.
        """
        ...


# -- the same without Python: packets between two processes of one machine ---------------------------------------------


class PacketPlace(NamedTuple):
    """Where a peer's packets come and go: a socket that does not block, the number of the next message each way."""

    file: int
    due: int
    next: int


@dataclass(frozen=True, slots=True)
class PacketHead:
    """A message's packet up to its arrays. `number_at`: where its number is, 8 bytes, the least first."""

    data: bytes
    number_at: int


class PacketQuestion(NamedTuple):
    """A question to a creditor that goes out as a packet, and the answer that comes back: both up to their arrays.

    `shape`, `nbytes`: of its queries.
    """

    creditor: str
    question: PacketHead
    answer: PacketHead
    shape: tuple[int, ...]
    nbytes: int


class AnsweredQuestions(NamedTuple):
    """What native code has done.

    Fields:
        counts: Questions of each end that were answered.
        source, packet: A packet that is not answered natively, and its end; -1 for none.
    """

    counts: tuple[int, ...]
    source: int = -1
    packet: bytes = b""


@runtime_checkable
class PacketLoanLink(LoanLink, Protocol):
    """Reach creditors by packets of this process's own."""

    @property
    def turn(self) -> int:
        """Prepared questions are good for as long as this is the same."""
        ...

    def prepare_packets(
        self, asks: Sequence[tuple[str, LoanQuery]], dtype: str, head: tuple[int, int]
    ) -> Sequence[PacketQuestion] | None:
        """Return the packets of questions to these creditors, with queries of this type, [tokens, *head].

        None: they do not go this way, and `send_query` takes them.
        """
        ...

    def find_places(self, creditors: Sequence[str]) -> Mapping[str, PacketPlace] | None:
        """Return where the next question to each of these creditors may go now, and its answer comes.

        None: they do not go this way now. Nothing else is sent until `count_packets`. Raises LoanLost.
        """
        ...

    def count_packets(
        self,
        questions: Sequence[PacketQuestion],
        sent: int,
        received: int,
        packet: bytes | None,
        before: Mapping[str, int],
    ) -> Sequence[int]:
        """Take it that the first of these questions, each to another creditor, were sent, and the first of their
        answers received; before them, so many by creditor were sent and answered.

        `packet`: what came instead of the next answer. Returns the tickets of the answers that are still to come.
        """
        ...


class PacketReceiver(Protocol):
    """Waits for packets natively. For one thread."""

    def receive(self, file: int, seconds: float) -> memoryview | None:
        """Return the next packet of a socket, empty at the end of the connection; None if none came in time.

        It is valid until the next call.
        """
        ...


class KnownQuestions(Protocol):
    """Answers questions natively that have come before. For one thread, but for `invalidate`."""

    @property
    def stamp(self) -> int:
        """Changes with `invalidate`."""
        ...

    def invalidate(self) -> None:
        """Answer no question that is known now any more. From any thread."""
        ...

    def clear(self) -> None: ...

    def __len__(self) -> int:
        """Return the number of known questions."""
        ...

    def learn(
        self, end: int, question: PacketHead, answer: PacketHead, query: LoanQuery, array: Array, stamp: int
    ) -> None:
        """Answer a question from now on, if native code can.

        Args:
            end: Its connection, as in `answer`.
            array: Its queries; later ones have this type and shape.
            stamp: The stamp before it was answered. Another one now: it is not learnt.
        """
        ...

    def answer(self, ends: Sequence[PacketPlace], files: Sequence[int], seconds: float) -> AnsweredQuestions | None:
        """Answer the known questions that come from these ends, for up to `seconds` without one.

        It returns at anything else that comes there, or to `files`. None, at once, if these are too many.
        """
        ...


class LoanExchange(NamedTuple):
    """An engine's native code for both ends of the link."""

    receiver: PacketReceiver
    known: KnownQuestions


@runtime_checkable
class ExchangingEngine(Protocol):
    """Define an engine that may exchange packets natively."""

    def exchange_packets(self, room: int) -> LoanExchange | None:
        """Return native code for packets of up to `room` bytes; None if there is none. Once, before `borrow`."""
        ...
