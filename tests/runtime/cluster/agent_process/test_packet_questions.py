"""Questions of a debtor as packets past its messenger: which go so, what is counted, open, and put back (IL-27)."""

from __future__ import annotations

import os
import select
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from runtime.chains import Array
from runtime.cluster.agent_process.packet_questions import PacketQuestions
from runtime.loans import MOST_HEAD_BYTES, LoanQuery, PacketPlace, PacketQuestion
from runtime.messages import AttendLoans, LoansAttended
from runtime.transport.channels.seqpacket import PACKET_BYTES
from runtime.transport.messenger import Envelope, Messenger, PeerCut
from runtime.transport.packets import numbered

HEADS, WIDTH, NAMES = 2, 4, ("d1", "d2")
#: A question to each creditor, its turn is not the first one.
ASKED = AttendLoans(5, LoanQuery(((1,),), ((8,),), (1,), 0))
QUERY = Array("float32", (1, HEADS, WIDTH), bytes(range(4 * HEADS * WIDTH)))
MADE = (
    Array("float64", (1, HEADS, WIDTH), bytes(range(8 * HEADS * WIDTH))),
    Array("float64", (1, HEADS, 2), bytes(range(16 * HEADS))),
)


class Prepared(NamedTuple):
    """A question, and where it may go."""

    packet: PacketQuestion
    place: PacketPlace


class Receiver:
    """`runtime.loans.PacketReceiver` in Python."""

    def receive(self, file: int, seconds: float) -> memoryview | None:
        if not select.select([file], [], [], seconds)[0]:
            return None
        with socket.socket(fileno=os.dup(file)) as end:
            return memoryview(end.recv(PACKET_BYTES))


class Exchange:
    """A debtor `d0` with packets of two creditors, which answer as a test says."""

    def __init__(self, folder: Path) -> None:
        self.creditors = {name: Messenger(name, 1, f"unix://{folder}/{name}") for name in NAMES}
        self.debtor, self._came = Messenger("d0", 1), defaultdict[str, list[Envelope | PeerCut]](list)
        self.questions = PacketQuestions(self.debtor, Receiver())
        for name, creditor in self.creditors.items():
            self.debtor.learn(name, 1, creditor.address, calls=False)
            self.debtor.send(name, ASKED, (QUERY,))
            self.answer(name)
        assert sorted(self.next().sender for _ in NAMES) == [*NAMES]

    def next(self, to: str = "d0") -> Envelope:
        """Return the next message that a messenger receives."""
        messenger, came = self.creditors.get(to, self.debtor), self._came[to]
        for _ in range(100):
            if came:
                break
            came += messenger.receive(0.05)
        item = came.pop(0)
        assert isinstance(item, Envelope), item
        return item

    def answer(self, name: str, message: LoansAttended = LoansAttended(ASKED.turn)) -> None:
        """Have a creditor receive a question and answer it."""
        came = self.next(name)
        assert (came.message, bytes(came.arrays[0].data)) == (ASKED, QUERY.data)
        self.creditors[name].send("d0", message, MADE if not message.error else ())

    def received(self, ticket: int) -> list[bytes] | None:
        place = self.questions.find_place(ticket)
        assert place is not None
        made = self.questions.receive(ticket, place, 1.0)
        return None if made is None else [bytes(each.data) for each in made]

    def asks(self, *names: str, width: int = WIDTH) -> list[PacketQuestion] | None:
        return self.questions.prepare([(name, ASKED) for name in names], QUERY.dtype, (HEADS, width))

    def prepared(self) -> list[Prepared]:
        made = self.asks(*NAMES)
        places = self.questions.find_places(NAMES)
        assert made is not None
        assert places is not None
        return [Prepared(each, places[each.creditor]) for each in made]

    def count(self, made: list[Prepared], ticket: int, sent: int, received: int, packet: bytes | None) -> list[str]:
        return self.questions.count([each.packet for each in made], ticket, sent, received, packet)

    def close(self) -> None:
        for each in (self.debtor, *self.creditors.values()):
            each.close()


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[Exchange]:
    made = Exchange(tmp_path)
    yield made
    made.close()


def sent(question: Prepared) -> None:
    """Send a prepared question past the messenger."""
    with socket.socket(fileno=os.dup(question.place.file)) as end:
        end.send(bytes(numbered(question.packet.question, question.place.next)) + QUERY.data)


def answer_to(question: Prepared) -> None:
    """Take the answer to a prepared question past the messenger."""
    with socket.socket(fileno=os.dup(question.place.file)) as end:
        assert end.recv(PACKET_BYTES)[: len(question.packet.answer.data)] == numbered(
            question.packet.answer, question.place.due
        )


def test_questions_that_are_too_long_for_native_code_are_no_packets(tmp_path: Path) -> None:
    exchange = Exchange(tmp_path)
    for loans, fits in ((100, True), (400, False)):
        asked = structs.replace(ASKED, query=LoanQuery((tuple(range(loans)),), ((8,) * loans,), (1,), 0))
        made = exchange.questions.prepare([("d1", asked)], QUERY.dtype, (HEADS, WIDTH))
        assert (made is not None) == fits
        assert made is None or len(made[0].question.data) <= MOST_HEAD_BYTES


def test_questions_and_answers_pass_the_messenger_by(exchange: Exchange) -> None:
    """Also in later turns; messages of the messenger go on from them."""
    for ticket in range(3):
        assert exchange.questions.send(ticket, "d1", ASKED, (QUERY,))
        exchange.answer("d1")
        assert exchange.received(ticket) == [each.data for each in MADE]
        assert exchange.questions.find_place(ticket) is None, "it is not open any more"
        exchange.debtor.send("d1", ASKED, (QUERY,))
        exchange.answer("d1")
        assert exchange.next().message == LoansAttended(ASKED.turn)


def test_what_is_no_such_question_is_the_messengers(exchange: Exchange) -> None:
    for arrays in ((), (QUERY, QUERY), (structs.replace(QUERY, data=QUERY.data[:-4]),)):
        assert not exchange.questions.send(1, "d1", ASKED, arrays)
    flat = Array("float32", (HEADS, WIDTH), QUERY.data)
    assert not exchange.questions.send(1, "d1", ASKED, (flat,))
    assert not exchange.questions.send(1, "d3", ASKED, (QUERY,))
    assert exchange.questions.find_place(1) is None
    assert exchange.questions.find_places(["d1", "d3"]) is None
    assert exchange.asks("d1", width=1 << 14) is None
    assert exchange.creditors["d1"].receive(0.05) == []


def test_a_question_that_cannot_go_out_is_not_open(exchange: Exchange) -> None:
    [one, _] = exchange.prepared()
    with socket.socket(fileno=os.dup(one.place.file)) as end, suppress(BlockingIOError):
        while True:
            end.send(bytes(1 << 16))
    assert not exchange.questions.send(1, "d1", ASKED, (QUERY,))
    assert exchange.questions.find_place(1) is None


def test_an_answer_of_other_bytes_is_the_messengers(exchange: Exchange) -> None:
    for ticket in range(2):
        assert exchange.questions.send(ticket, "d1", ASKED, (QUERY,))
    exchange.answer("d1", LoansAttended(ASKED.turn, "it is not here"))
    exchange.answer("d1")
    assert exchange.received(0) is None
    assert exchange.questions.find_place(0) is None, "what was put back is due first"
    assert exchange.questions.find_places(["d1"]) is None
    assert exchange.next().message == LoansAttended(ASKED.turn, "it is not here")
    assert exchange.next().message == LoansAttended(ASKED.turn)
    for ticket in range(2):
        exchange.questions.close_question(ticket)
        assert exchange.questions.find_place(ticket) is None
    assert exchange.questions.send(2, "d1", ASKED, (QUERY,))
    exchange.answer("d1")
    assert exchange.received(2) == [each.data for each in MADE]


@pytest.mark.parametrize("received", [0, 1, 2])
def test_answers_that_native_code_has_not_received_are_open(exchange: Exchange, received: int) -> None:
    """They are received from where they come, in any order."""
    for first in (10, 20):
        questions = exchange.prepared()
        for name, question in zip(NAMES, questions, strict=True):
            sent(question)
            exchange.answer(name)
        for question in questions[:received]:
            answer_to(question)
        assert exchange.count(questions, first, 2, received, None) == [*NAMES[received:]]
        for at in reversed(range(2)):
            if at < received:
                assert exchange.questions.find_place(first + at) is None
            else:
                assert exchange.questions.find_place(first + at) == PacketPlace(
                    questions[at].place.file, questions[at].place.due, questions[at].place.next + 1
                )
                assert exchange.received(first + at) == [each.data for each in MADE]


def test_questions_that_native_code_has_not_sent_are_the_callers(exchange: Exchange) -> None:
    questions = first, second = exchange.prepared()
    sent(first)
    assert exchange.count(questions, 1, 1, 0, None) == ["d1"]
    assert exchange.questions.find_place(2) is None
    exchange.answer("d1")
    assert exchange.received(1) is not None
    assert exchange.prepared()[1].place == second.place


def test_a_packet_that_came_instead_is_put_back_where_it_came_from(exchange: Exchange) -> None:
    questions = exchange.prepared()
    for name, question in zip(NAMES, questions, strict=True):
        sent(question)
        exchange.answer(name, LoansAttended(ASKED.turn, "" if name == "d1" else "it is not here"))
    answer_to(questions[0])
    with socket.socket(fileno=os.dup(questions[1].place.file)) as end:
        packet = end.recv(PACKET_BYTES)
    assert exchange.count(questions, 7, 2, 1, packet) == ["d2"]
    came = exchange.next()
    assert (came.sender, came.message) == ("d2", LoansAttended(ASKED.turn, "it is not here"))
    exchange.questions.close_question(8)
    assert [each.place.due for each in exchange.prepared()] == [each.place.due + 1 for each in questions]


def test_nothing_is_open_after_all_is_given_up(exchange: Exchange) -> None:
    for ticket, name in enumerate(NAMES):
        assert exchange.questions.send(ticket, name, ASKED, (QUERY,))
        assert exchange.questions.find_place(ticket) is not None
    exchange.questions.clear()
    assert exchange.questions.find_place(0) is exchange.questions.find_place(1) is None
