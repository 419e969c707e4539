"""Questions to lent pages over the side link: each gets its own answer, and late ones are dropped (IL-27)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from runtime.chains import Array
from runtime.cluster.agent_process.side_link import SideClient, SidePeers, SideServer, side_messengers
from runtime.loans import LoanLink, LoanQuery
from runtime.types import LoanLost


class Echo:
    """A creditor that sends the queries back; it refuses loan 9, and waits for `free` before it answers loan 8."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def borrow(self, link: LoanLink, shipping: str = "query") -> None: ...

    def hold_loan(
        self, loan: int, groups: Sequence[Sequence[int]], tokens: int, debtor: str, first_layer: int = 0
    ) -> None: ...

    def drop_loan(self, loan: int) -> None: ...

    def attend_loans(self, query: LoanQuery, arrays: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        if query.loans == ((9,),):
            raise LoanLost("it is not here")
        if query.loans == ((8,),):
            assert self.free.wait(30)
        return tuple(arrays)


class Ends:
    """A debtor `d0` with a link to two creditors."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.peers, self._closing = SidePeers(), list[SideServer | SideClient]()
        self.creditors = {name: Echo() for name in ("d1", "d2")}
        known = {"d0": (1, "")}
        for name, echo in self.creditors.items():
            server, client = side_messengers(name, 1, f"unix://{folder}/{name}", None, None)
            client.close()
            debtors = SidePeers()
            debtors.update({"d0": (1, "")})
            self._closing.append(SideServer(echo, server, debtors))
            known[name] = 1, server.address
        self.peers.update(known)
        server, client = side_messengers("d0", 1, f"unix://{folder}/d0", None, None)
        server.close()
        self.link = SideClient(client, self.peers, seconds)
        self._closing.append(self.link)

    def ask(self, creditor: str, text: bytes, loan: int = 1) -> int:
        array = Array("uint8", (1, 1, len(text)), text)
        return self.link.send_query(creditor, LoanQuery(((loan,),), ((16,),), (1,), 0), (array,))

    def told(self, ticket: int) -> bytes:
        return bytes(self.link.collect(ticket)[0].data)

    def close(self) -> None:
        for each in self.creditors.values():
            each.free.set()
        for end in reversed(self._closing):
            end.close()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path, 1.0)
    yield made
    made.close()


def test_each_question_gets_its_own_answer_in_any_order(ends: Ends) -> None:
    """Of equal messages to two creditors, collected in another order than they were sent in."""
    asked = {ends.ask(name, text): text for text in (b"one", b"two", b"six") for name in ("d1", "d2")}
    assert len(asked) == 6
    assert {ticket: ends.told(ticket) for ticket in reversed(asked)} == asked


def test_a_late_answer_is_not_that_of_a_later_question(ends: Ends) -> None:
    late = ends.ask("d1", b"late", loan=8)
    with pytest.raises(LoanLost, match="d1 did not answer"):
        ends.link.collect(late)
    ends.creditors["d1"].free.set()
    assert ends.told(ends.ask("d1", b"now")) == b"now"
    assert ends.told(ends.ask("d1", b"then")) == b"then"


def test_an_error_gives_up_all_that_is_under_way(ends: Ends) -> None:
    other, wrong = ends.ask("d2", b"other"), ends.ask("d1", b"wrong", loan=9)
    with pytest.raises(LoanLost, match="d1: LoanLost"):
        ends.link.collect(wrong)
    with pytest.raises(KeyError):
        ends.link.collect(other)
    assert [ends.told(ends.ask(name, b"next")) for name in ("d1", "d2")] == [b"next"] * 2


def test_an_unknown_creditor_is_an_error(ends: Ends) -> None:
    with pytest.raises(LoanLost, match="d3, which holds K and V, is gone"):
        ends.ask("d3", b"who")
