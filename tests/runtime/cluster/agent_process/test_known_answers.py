"""Questions to lent pages that native code answers, with the same bytes; all else goes to Python (IL-27)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from msgspec import structs

from runtime.chains import Array
from runtime.cluster.agent_process.side_link import SideClient, SidePeers, SideServer, side_messengers
from runtime.config import EngineConfig
from runtime.engine.attention.lent import LentPages, native_exchange
from runtime.engine.kernels.paged_attention import native_attention
from runtime.engine.models.registry import kernels_for
from runtime.engine.tensors.convert import array_of
from runtime.kv.pool import Geometry, PagePool
from runtime.loans import LoanExchange, LoanLink, LoanQuery
from runtime.messages import AttendLoans, LoansAttended, Message
from runtime.transport.channels.seqpacket import PACKET_BYTES, lengths_of
from runtime.transport.messenger import Messenger
from runtime.transport.packets import head_of, numbered
from runtime.transport.wire import encode
from runtime.types import LoanLost
from tests.runtime.engine.compiled import needs_kernels

pytestmark = needs_kernels
HEADS, KV_HEADS, WIDTH, PAGE, LAYERS, SETS = 4, 2, 16, 8, 3, 20


#: An array: dtype, shape, bytes.
_Read = tuple[str, tuple[int, ...], bytes]


class Creditor:
    """Pages with random K and V in some layers, of loans 1 and 2 of d0, 3 and 4 of d2.

    `calls`: how often Python attended to them.
    """

    def __init__(self, dtype: str = "float32") -> None:
        kernels, made = kernels_for(EngineConfig()), torch.Generator().manual_seed(1)
        assert kernels is not None
        kind = getattr(torch, dtype)
        half, count = PAGE * KV_HEADS * WIDTH * kind.itemsize, 2 * LAYERS * SETS
        pool, at = PagePool(2 * half * count, half), torch.arange(count * PAGE)
        k, v = (torch.randn(len(at), KV_HEADS, WIDTH, generator=made).to(kind) for _ in range(2))
        pool.view(Geometry(KV_HEADS, WIDTH, kind), PAGE).write(at // PAGE, at % PAGE, k, v)
        self.lent, self.kernels = LentPages(native_attention(kernels), pool, torch.device("cpu")), kernels
        self.calls = 0
        self.pages = torch.arange(count).view(2, SETS, LAYERS).tolist()
        for loan, debtor in ((1, "d0"), (2, "d0"), (3, "d2"), (4, "d2")):
            self.lent.hold_loan(loan, self.pages[(loan - 1) % 2], SETS * PAGE, debtor)

    def exchange_packets(self, room: int) -> LoanExchange | None:
        return native_exchange(self.kernels, self.lent, room)

    def borrow(self, link: LoanLink, shipping: str = "query") -> None: ...

    def hold_loan(
        self, loan: int, groups: Sequence[Sequence[int]], tokens: int, debtor: str, first_layer: int = 0
    ) -> None: ...

    def drop_loan(self, loan: int) -> None: ...

    def attend_loans(self, query: LoanQuery, arrays: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        self.calls += 1
        return self.lent.attend(query, arrays, debtor)

    def answer(self, query: LoanQuery, arrays: Sequence[Array], debtor: str = "d0") -> list[_Read]:
        """The right answer, which is not counted."""
        return read(self.lent.attend(query, arrays, debtor))


class Sides:
    """A creditor `d1` and its debtors, `d0` first. `native`: what native code does, of `server` and `client`."""

    def __init__(self, folder: Path, creditor: Creditor, native: str = "server client", seconds: float = 2.0) -> None:
        self.creditor, self.folder, self._seconds = creditor, folder, seconds
        self.peers, self.debtors = SidePeers(), SidePeers()
        exchange = creditor.exchange_packets(PACKET_BYTES)
        assert exchange is not None
        server, client = side_messengers("d1", 1, f"unix://{folder}/d1", None, None)
        client.close()
        self.debtors.update(dict.fromkeys(("d0", "d2"), (1, "")))
        self._closing: list[SideServer | SideClient] = [
            SideServer(creditor, server, self.debtors, exchange.known if "server" in native else None)
        ]
        self.peers.update({"d1": (1, server.address)})
        self._receiver = exchange.receiver if "client" in native else None
        self.link = self.debtor("d0")

    def debtor(self, name: str) -> SideClient:
        link = SideClient(Messenger(name, 1), self.peers, self._seconds, self._receiver)
        self._closing.append(link)
        return link

    def close(self) -> None:
        for each in reversed(self._closing):
            each.close()


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    made = Sides(tmp_path, Creditor())
    yield made
    made.close()


def question(layer: int, loans: Sequence[int] = (1,), dtype: str = "float32", tokens: int = SETS * PAGE) -> LoanQuery:
    """A decode step's: a row of one token for each loan."""
    rows = len(loans)
    return LoanQuery(tuple((each,) for each in loans), ((tokens,),) * rows, (1,) * rows, layer, KV_HEADS, dtype)


def queries(rows: int, seed: int, dtype: str = "float32") -> tuple[Array, ...]:
    made = torch.randn(rows, HEADS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return (array_of(made.to(getattr(torch, dtype))),)


def read(arrays: Sequence[Array]) -> list[_Read]:
    return [(each.dtype, each.shape, bytes(each.data)) for each in arrays]


def told(link: SideClient, query: LoanQuery, arrays: tuple[Array, ...]) -> list[_Read]:
    return read(link.collect(link.send_query("d1", query, arrays)))


@pytest.mark.parametrize(("kept", "asked"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_a_question_is_answered_natively_from_the_second_time_on(tmp_path: Path, kept: str, asked: str) -> None:
    creditor = Creditor(kept)
    sides = Sides(tmp_path, creditor)
    for step in range(4):
        for layer in range(LAYERS):
            for loans in ((1,), (2, 1)):
                query, arrays = question(layer, loans, kept), queries(len(loans), 10 * step + layer, asked)
                assert told(sides.link, query, arrays) == creditor.answer(query, arrays)
    sides.close()
    assert creditor.calls <= 4 * LAYERS, "each question once, of four times; a few more between two native calls"


@pytest.mark.parametrize("native", ["server", "client", ""])
def test_each_end_may_be_without_native_code(tmp_path: Path, native: str) -> None:
    creditor = Creditor()
    sides = Sides(tmp_path, creditor, native)
    for step in range(3):
        for layer in range(LAYERS):
            arrays = queries(1, 7 * step + layer)
            assert told(sides.link, question(layer), arrays) == creditor.answer(question(layer), arrays)
    sides.close()
    assert creditor.calls == 3 * LAYERS if native != "server" else creditor.calls < 3 * LAYERS


def test_a_changed_loan_is_no_longer_the_known_one(sides: Sides) -> None:
    lent, arrays = sides.creditor.lent, queries(1, 3)
    first = [told(sides.link, question(0), arrays) for _ in range(3)][-1]
    lent.hold_loan(1, sides.creditor.pages[1], SETS * PAGE, "d0")
    for _ in range(3):
        other = told(sides.link, question(0), arrays)
        assert other == sides.creditor.answer(question(0), arrays) != first
    lent.drop_loan(1)
    for _ in range(2):
        with pytest.raises(LoanLost, match="d1: LoanLost"):
            told(sides.link, question(0), arrays)
    lent.hold_loan(1, sides.creditor.pages[0], SETS * PAGE, "d0")
    assert [told(sides.link, question(0), arrays) for _ in range(3)] == [first] * 3


def test_a_loan_that_changes_while_it_is_attended_to_is_not_learnt(sides: Sides) -> None:
    lent, arrays, attend = sides.creditor.lent, queries(1, 3), sides.creditor.attend_loans

    def change(query: LoanQuery, given: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        made = attend(query, given, debtor)
        lent.hold_loan(1, sides.creditor.pages[1], SETS * PAGE, "d0")
        return made

    sides.creditor.attend_loans = change  # type: ignore[method-assign]
    before = told(sides.link, question(0), arrays)
    sides.creditor.attend_loans = attend  # type: ignore[method-assign]
    for _ in range(2):
        assert told(sides.link, question(0), arrays) == sides.creditor.answer(question(0), arrays) != before


def test_an_agent_in_an_ended_life_gets_no_known_answer(sides: Sides) -> None:
    arrays = queries(1, 3)
    for _ in range(3):
        told(sides.link, question(0), arrays)
    calls = sides.creditor.calls
    sides.debtors.update({"d0": (2, "")})
    with pytest.raises(LoanLost):
        told(sides.link, question(0), arrays)
    assert sides.creditor.calls == calls


def test_questions_of_several_debtors_keep_their_order(sides: Sides) -> None:
    """Known ones and new ones, short and long, with several under way; long ones go another way."""
    links = {"d0": sides.link, "d2": sides.debtor("d2")}
    for step in range(4):
        for name, link in links.items():
            one, two = (1, 2) if name == "d0" else (3, 4)
            asked: list[tuple[LoanQuery, tuple[Array, ...]]] = [
                (question(0, (one,)), queries(1, step)),
                (question(1, (two, one)), queries(2, step)),
                (LoanQuery(((one,),), ((SETS * PAGE,),), (700,), 1, KV_HEADS, "float32"), queries(700, step)),
                (question(2, (two,)), queries(1, 50 + step)),
                (LoanQuery(((two,),), ((SETS * PAGE,),), (1,), 2, KV_HEADS, "float32", pull=True), ()),
                (question(0, (one,)), queries(1, 90 + step)),
            ]
            tickets = [link.send_query("d1", *each) for each in asked]
            made = [read(link.collect(ticket)) for ticket in (tickets if step % 2 else reversed(tickets))]
            want = [sides.creditor.answer(*each, name) for each in asked]
            assert made == (want if step % 2 else want[::-1]), (step, name)


@pytest.mark.parametrize("native", ["server client", ""])
def test_a_loan_of_another_debtor_is_as_one_that_is_not_held(tmp_path: Path, native: str) -> None:
    """Also where its questions are known natively: they are known of the debtor's own connection."""
    sides, arrays = Sides(tmp_path, Creditor(), native), queries(1, 3)
    other = sides.debtor("d2")
    for _ in range(3):
        told(sides.link, question(0), arrays)
        told(other, question(0, (3,)), arrays)
    pull = LoanQuery(((1,),), ((SETS * PAGE,),), (1,), 2, KV_HEADS, "float32", pull=True)
    for query, given in ((question(0), arrays), (question(0, (3, 1)), queries(2, 3)), (pull, ())):
        for loan in (1, 77):
            loans = tuple(tuple(loan if each == 1 else each for each in row) for row in query.loans)
            with pytest.raises(LoanLost, match="d1: LoanLost"):
                told(other, structs.replace(query, loans=loans), given)
    assert told(sides.link, question(0), arrays) == sides.creditor.answer(question(0), arrays)
    assert told(other, question(0, (3,)), arrays) == sides.creditor.answer(question(0), arrays)
    sides.close()


def test_a_creditor_that_ends_is_a_lost_loan(sides: Sides) -> None:
    arrays = queries(1, 3)
    for _ in range(3):
        told(sides.link, question(0), arrays)
    sides._closing.pop(0).close()
    with pytest.raises(LoanLost):
        told(sides.link, question(0), arrays)


# -- packets that are no known question --------------------------------------------------------------------------------


def packet(number: int, message: Message, arrays: Sequence[Array], cut: int = 0) -> bytes:
    """A message; `cut`: bytes that its arrays lack."""
    *head, last = map(bytes, encode(number, message, arrays))
    frames = [*head, last[: len(last) - cut]]
    return lengths_of(frames) + b"".join(frames)


#: What comes behind two known questions, numbers 0 and 1.
KNOWN = AttendLoans(0, question(0))
WRONG: dict[str, Callable[[], bytes]] = {
    "an old number": lambda: packet(1, KNOWN, queries(1, 5)),
    "a later number": lambda: packet(7, KNOWN, queries(1, 5)),
    "a number of 64 bits": lambda: packet(2**64 - 1, KNOWN, queries(1, 5)),
    "too short": lambda: packet(2, KNOWN, queries(1, 5))[:-4],
    "too long": lambda: packet(2, KNOWN, queries(1, 5)) + bytes(4),
    "fewer queries": lambda: packet(2, KNOWN, queries(1, 5), cut=4),
    "a head without queries": lambda: bytes(numbered(head_of(KNOWN, queries(1, 5)), 2)),  # type: ignore[arg-type]
    "half a head": lambda: packet(2, KNOWN, queries(1, 5))[:30],
    "nothing": lambda: b"",
    "another protocol": lambda: packet(2, KNOWN, queries(1, 5)).replace(b"BZoo", b"BZoo\xff", 1)[:-1],
    "other magic": lambda: packet(2, KNOWN, queries(1, 5)).replace(b"BZoo", b"BZxx", 1),
    "an answer": lambda: packet(2, LoansAttended(0), queries(1, 5)),
    "another layer": lambda: packet(2, AttendLoans(0, question(9)), queries(1, 5)),
    "another loan": lambda: packet(2, AttendLoans(0, question(0, (7,))), queries(1, 5)),
    "more tokens": lambda: packet(2, AttendLoans(0, question(0, tokens=SETS * PAGE + PAGE)), queries(1, 5)),
    "a longer packet than any": lambda: packet(2, KNOWN, queries(1, 5)) + bytes(PACKET_BYTES),
}


def replies(folder: Path, wrong: bytes, native: str) -> list[bytes]:
    """What a debtor by hand gets for two equal questions, a wrong packet, and the question again."""
    sides = Sides(folder, Creditor(), native)
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.settimeout(5.0)
    end.connect(f"{folder}/d1.side.q")
    end.send(b"d0/1/main")
    out = []
    for number in (0, 1):
        end.send(packet(number, KNOWN, queries(1, number)))
        out.append(end.recv(1 << 18))
    with suppress(OSError):  # the creditor may close it at the first one
        end.send(wrong)
        end.settimeout(0.5)
        out.append(end.recv(1 << 18))
        end.send(packet(3, KNOWN, queries(1, 6)))
        out.append(end.recv(1 << 18))
    end.close()
    sides.close()
    assert sides.creditor.calls >= 1
    return out


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_question_is_refused_as_without_native_code(tmp_path: Path, wrong: str) -> None:
    found = []
    for native in ("server", ""):
        (folder := tmp_path / f"n{native}").mkdir()
        found.append(replies(folder, WRONG[wrong](), native))
    assert found[0] == found[1]
    assert len(found[0]) >= 2


MADE = (
    Array("float64", (1, HEADS, WIDTH), bytes(8 * HEADS * WIDTH)),
    Array("float64", (1, HEADS, 2), bytes(16 * HEADS)),
)
#: What a creditor sends instead of its third answer.
LIES: dict[str, Callable[[], bytes]] = {
    "an old number": lambda: packet(1, LoansAttended(0), MADE),
    "a later number": lambda: packet(9, LoansAttended(0), MADE),
    "too short": lambda: packet(2, LoansAttended(0), MADE)[:-8],
    "too long": lambda: packet(2, LoansAttended(0), MADE) + bytes(8),
    "fewer values": lambda: packet(2, LoansAttended(0), MADE, cut=8),
    "half a head": lambda: packet(2, LoansAttended(0), MADE)[:25],
    "nothing": lambda: b"",
    "another turn": lambda: packet(2, LoansAttended(4), MADE),
    "an error": lambda: packet(2, LoansAttended(0, "it is not here"), ()),
    "other arrays": lambda: packet(2, LoansAttended(0), MADE[:1]),
    "a question": lambda: packet(2, KNOWN, queries(1, 3)),
    "float32": lambda: packet(
        2, LoansAttended(0), (Array("float32", (1, HEADS, WIDTH), bytes(4 * HEADS * WIDTH)), MADE[1])
    ),
}


@contextmanager
def lying_creditor(folder: Path, lie: bytes) -> Iterator[None]:
    """A creditor `d1` that gives right answers, but a lie to the third question."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{folder}/d1.q")
    listener.listen(1)
    inbox = Messenger("d1", 1, f"ipc://{folder}/d1")  # the other way, which stays silent

    def answer() -> None:
        end, _ = listener.accept()
        end.recv(256)
        with suppress(OSError):
            for number in range(20):
                if not end.recv(1 << 18):
                    break
                end.send(lie if number == 2 else packet(number, LoansAttended(int(number > 2)), MADE))
        listener.close()
        end.close()

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    thread.join()
    inbox.close()


def outcome(folder: Path, lie: bytes, native: str) -> list[object]:
    """What a debtor makes of two right answers, a lie and an answer to the next question, and the text of its error."""
    peers, known, out = SidePeers(), Creditor().exchange_packets(PACKET_BYTES), list[object]()
    peers.update({"d1": (1, f"unix://{folder}/d1")})
    assert known is not None
    with lying_creditor(folder, lie):
        link = SideClient(Messenger("d0", 1), peers, 0.4, known.receiver if native else None)
        for _ in range(4):
            try:
                out.append(told(link, question(0), queries(1, 1)))
            except LoanLost as error:
                out.append(str(error))
        link.close()
    return out


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_creditor_is_treated_as_without_native_code(tmp_path: Path, lie: str) -> None:
    found = []
    for native in ("client", ""):
        (folder := tmp_path / f"n{native}").mkdir()
        found.append(outcome(folder, LIES[lie](), native))
    assert found[0] == found[1]
    assert found[0][0] == read(MADE)
