"""Native waits for packets take little of a core, and native code is given only what it can compute (IL-27)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from runtime.chains import Array
from runtime.config import EngineConfig
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.lent import LentPages, native_exchange
from runtime.engine.attention.partial import PartialAttention
from runtime.engine.kernels.away_calls import AskedQuestions, AwayDone, RowParts, native_away
from runtime.engine.kernels.exchange import Decoding, NativeQuestions, NativeReceiver
from runtime.engine.kernels.paged_attention import NativeAttention, native_attention
from runtime.engine.models.registry import kernels_for
from runtime.engine.step.context import PagedMetadata, RowSpan
from runtime.kv.pool import Geometry, PagePool
from runtime.loans import AnsweredQuestions, LoanExchange, LoanQuery, PacketHead, PacketPlace, PacketQuestion
from tests.runtime.engine.compiled import needs_kernels

pytestmark = needs_kernels
HEADS, KV_HEADS, WIDTH, PAGE, LAYERS, SETS, ROOM = 4, 2, 8, 4, 2, 3, 4096


@pytest.fixture
def exchange() -> LoanExchange:
    kernels = kernels_for(EngineConfig())
    assert kernels is not None
    pool = PagePool(2 * PAGE * KV_HEADS * WIDTH * 4 * LAYERS * SETS, PAGE * KV_HEADS * WIDTH * 4)
    lent = LentPages(native_attention(kernels), pool, torch.device("cpu"))
    lent.hold_loan(1, torch.arange(LAYERS * SETS).view(SETS, LAYERS).tolist(), SETS * PAGE, "d0")
    made = native_exchange(kernels, lent, ROOM)
    assert made is not None
    return made


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield pair
    for each in pair:
        each.close()


def learn(exchange: LoanExchange, layer: int = 0, end: int = 0, answer: bytes = bytes(8)) -> None:
    head = PacketHead(bytes(8) + bytes([layer]), 0)
    query = LoanQuery(((1,),), ((SETS * PAGE,),), (1,), layer, KV_HEADS, "float32")
    array = Array("float32", (1, HEADS, WIDTH), bytes(4 * HEADS * WIDTH))
    exchange.known.learn(end, head, PacketHead(answer, 0), query, array, exchange.known.stamp)


def test_a_wait_in_vain_ends_in_time_and_sleeps(
    exchange: LoanExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    learn(exchange)
    place = PacketPlace(ends[0].fileno(), 0, 0)
    for wait, nothing in (
        (lambda: exchange.receiver.receive(place.file, 0.05), None),
        (lambda: exchange.known.answer([place], [], 0.05), AnsweredQuestions((0,))),
    ):
        begin, used = time.monotonic(), time.thread_time()
        for _ in range(10):
            assert wait() == nothing
        assert time.monotonic() - begin > 0.45
        assert time.thread_time() - used < 0.05


def test_packets_the_end_of_a_connection_and_too_long_ones(
    exchange: LoanExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    mine, theirs = ends
    for packet in (b"one", bytes(ROOM), bytes(ROOM + 9)):
        theirs.send(packet)
        assert exchange.receiver.receive(mine.fileno(), 1.0) == packet[:ROOM]
    timer = threading.Timer(0.1, theirs.send, [b"late"])
    timer.start()
    assert exchange.receiver.receive(mine.fileno(), 5.0) == b"late"
    timer.join()
    theirs.close()
    assert exchange.receiver.receive(mine.fileno(), 1.0) == b""


def test_known_questions_are_answered_until_something_else_is_ready(
    exchange: LoanExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    mine, theirs = ends
    for layer in range(LAYERS):
        learn(exchange, layer)
        learn(exchange, layer)
    assert len(exchange.known) == LAYERS, "each once"
    queries = torch.randn(HEADS * WIDTH).numpy().tobytes()
    for number, layer in enumerate((0, 1, 0, 1)):
        theirs.send(number.to_bytes(8, "little") + bytes([layer]) + queries)
    done = exchange.known.answer([PacketPlace(mine.fileno(), 0, 7)], [], 0.1)
    assert done == ((4,), -1, b"")
    assert [int.from_bytes(theirs.recv(ROOM)[:8], "little") for _ in range(4)] == [7, 8, 9, 10]
    beside, ring = socket.socketpair()
    ring.send(b"x")
    begin, quiet = time.monotonic(), theirs.fileno()
    for files in ([beside.fileno()], [quiet, beside.fileno()], [beside.fileno(), quiet]):
        assert exchange.known.answer([PacketPlace(mine.fileno(), 4, 11)], files, 5.0) == ((0,), -1, b"")
    theirs.send((4).to_bytes(8, "little") + bytes([1]) + queries)
    theirs.send((5).to_bytes(8, "little") + bytes([1]) + queries)
    done = exchange.known.answer([PacketPlace(mine.fileno(), 4, 11)], [beside.fileno()], 5.0)
    assert done is not None and done.counts == (1,), "what else is ready gets its turn behind each question"
    assert time.monotonic() - begin < 4.0
    for each in (beside, ring):
        each.close()


def test_what_is_invalid_is_handed_over(exchange: LoanExchange, ends: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = ends
    learn(exchange)
    exchange.known.invalidate()
    packet = bytes(9 + 4 * HEADS * WIDTH)
    theirs.send(packet)
    assert exchange.known.answer([PacketPlace(mine.fileno(), 0, 0)], [], 1.0) == ((0,), 0, packet)
    learn(exchange)
    theirs.send(packet)
    done = exchange.known.answer([PacketPlace(mine.fileno(), 0, 0)], [], 0.1)
    assert done is not None and done.counts == (1,), "learnt again"
    exchange.known.clear()
    theirs.send(packet)
    assert len(exchange.known) == 0
    assert exchange.known.answer([PacketPlace(mine.fileno(), 1, 1)], [], 1.0) == ((0,), 0, packet)


def test_waits_spin_less_where_they_are_long_and_more_where_they_are_short(
    exchange: LoanExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    mine, theirs = ends
    receiver, known = exchange.receiver, exchange.known
    assert isinstance(receiver, NativeReceiver) and isinstance(known, NativeQuestions)
    learn(exchange)
    place, most = PacketPlace(mine.fileno(), 0, 0), receiver._spin.most
    for _ in range(20):
        assert receiver.receive(mine.fileno(), 0.001) is None
    assert 0 <= receiver._spin.limit < most // 50
    timer = threading.Timer(0.05, theirs.send, [bytes(9 + 4 * HEADS * WIDTH)])
    timer.start()
    assert known.answer([place], [], 0.3) == AnsweredQuestions((1,))
    timer.join()
    assert known._data.spin.limit == most - most // 4
    least = receiver._spin.limit
    for _ in range(200):
        theirs.send(b"one")
        assert receiver.receive(mine.fileno(), 1.0) == b"one"
    assert least < receiver._spin.limit <= most, "such a wait has not slept"
    receiver._spin.limit = most
    for _ in range(20):
        theirs.send(b"one")
        assert receiver.receive(mine.fileno(), 1.0) == b"one"
    assert receiver._spin.limit == most
    receiver._spin.most, receiver._spin.limit = 1 << 40, 0  # a wait that slept, but less than it might have spun
    timer = threading.Timer(0.05, theirs.send, [b"late"])
    timer.start()
    assert receiver.receive(mine.fileno(), 5.0) == b"late"
    timer.join()
    assert 1_000_000 < receiver._spin.limit < 5_000_000_000


def test_questions_may_come_for_longer_than_a_wait_lasts(
    exchange: LoanExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    mine, theirs = ends
    learn(exchange)

    def ask() -> None:
        for number in range(6):
            theirs.send(number.to_bytes(8, "little") + bytes(1 + 4 * HEADS * WIDTH))
            theirs.recv(ROOM)
            time.sleep(0.1)

    thread = threading.Thread(target=ask)
    thread.start()
    done = exchange.known.answer([PacketPlace(mine.fileno(), 0, 0)], [], 0.35)
    thread.join()
    assert done is not None and done.counts == (6,)


def test_questions_are_known_of_their_connection_alone(
    exchange: LoanExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    """And they are answered there, whatever else is known."""
    learn(exchange)
    learn(exchange, end=1)
    learn(exchange, 1, end=1)
    mine, theirs = ends
    other, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other, its:
        places = [PacketPlace(mine.fileno(), 0, 0), PacketPlace(other.fileno(), 3, 5)]
        its.send((3).to_bytes(8, "little") + bytes([1]) + bytes(4 * HEADS * WIDTH))
        assert exchange.known.answer(places, [], 0.1) == ((0, 1), -1, b"")
        assert int.from_bytes(its.recv(ROOM)[:8], "little") == 5
        packet = bytes(8) + bytes([1]) + bytes(4 * HEADS * WIDTH)
        theirs.send(packet)
        assert exchange.known.answer(places, [], 1.0) == ((0, 0), 0, packet)


def test_a_connection_that_breaks_is_left_to_python(
    exchange: LoanExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    """Closed with something unread, it gives an error before its end."""
    learn(exchange)
    mine, theirs = ends
    mine.send(b"unread")
    theirs.close()
    begin = time.monotonic()
    place = PacketPlace(mine.fileno(), 0, 0)
    assert exchange.known.answer([place], [], 5.0) == AnsweredQuestions((0,))
    assert exchange.known.answer([place], [], 5.0) == ((0,), 0, b"")
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine:
        mine.send(b"unread")
        theirs.close()
        assert exchange.receiver.receive(mine.fileno(), 5.0) == b""
    assert time.monotonic() - begin < 4.0


def test_an_answer_that_cannot_go_out_is_left_to_python(
    exchange: LoanExchange, ends: tuple[socket.socket, socket.socket]
) -> None:
    learn(exchange)
    mine, theirs = ends
    mine.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            mine.send(bytes(1024))
    packet = bytes(9 + 4 * HEADS * WIDTH)
    theirs.send(packet)
    assert exchange.known.answer([PacketPlace(mine.fileno(), 0, 0)], [], 1.0) == ((0,), 0, packet)


def test_what_is_known_is_bounded(exchange: LoanExchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engine.kernels.exchange._MOST_KNOWN", 5)
    for end in range(12):
        learn(exchange, end=end)
        assert len(exchange.known) == end % 5 + 1
    place = PacketPlace(0, 0, 0)
    assert exchange.known.answer([place], [0] * 256, 0.0) is None, "more descriptors than are polled"


def test_a_head_that_is_too_long_is_not_learnt(exchange: LoanExchange) -> None:
    learn(exchange, answer=bytes(1025))
    assert len(exchange.known) == 0
    learn(exchange, answer=bytes(1024))
    assert len(exchange.known) == 1


def test_the_debtors_call_stops_where_a_question_cannot_go_out(ends: tuple[socket.socket, socket.socket]) -> None:
    """Its head is too long, or the connection takes no more."""
    kernels = kernels_for(EngineConfig())
    assert kernels is not None
    away = native_away(kernels, ROOM)
    assert away is not None
    mine, theirs = ends
    mine.setblocking(False)
    pool, count = PagePool(2 * PAGE * KV_HEADS * WIDTH * 4, PAGE * KV_HEADS * WIDTH * 4), 8 * HEADS * WIDTH + 16 * HEADS
    view = pool.view(Geometry(KV_HEADS, WIDTH, torch.float32), PAGE)
    view.k.zero_(), view.v.zero_()
    tables, lengths = torch.zeros(1, 1, 1, dtype=torch.int64), torch.tensor([PAGE])
    here = Decoding.over_pages(view, tables, lengths, (HEADS, WIDTH), (1.0, 0.0), 1)
    rooms = torch.zeros(2, 1, HEADS, WIDTH).double(), torch.zeros(2, 1, HEADS, 2).double()
    query = torch.randn(1, HEADS, WIDTH)

    def attend(length: int) -> AwayDone:
        heads = PacketHead(bytes(length), 3), PacketHead(b"answer..........", 8)
        question = PacketQuestion("d1", *heads, tuple(query.shape), 4 * query.numel())
        asked = AskedQuestions([question], [RowParts((0,), (0,))], {"d1": away.end_of("d1")})
        calls = away.calls(query, here, [1], rooms, torch.tensor([0]))
        assert [calls.has(layer) for layer in (-1, 0, 1)] == [False, True, False]
        away.point_to({"d1": PacketPlace(mine.fileno(), 4, 9)})
        return away.attend(calls.at_layer(0, asked), query, None)

    assert attend(1025) == AwayDone()
    theirs.send(b"answer.." + (4).to_bytes(8, "little") + bytes(count))
    assert attend(1024) == AwayDone(1, True, 1)
    sent = theirs.recv(2 * ROOM)
    assert sent == bytes(3) + (9).to_bytes(8, "little") + bytes(1013) + query.numpy().tobytes()
    theirs.send(b"answer.." + (4).to_bytes(8, "little") + bytes(ROOM))
    done = attend(16)
    assert done[:3] == (1, True, 0) and done.packet is not None and len(done.packet) == ROOM, "as much as there is room"
    begin = time.monotonic()
    assert attend(16) == AwayDone(1, True, 0), "no answer"
    assert 0.015 < time.monotonic() - begin < 2.0
    with suppress(BlockingIOError):
        while True:
            mine.send(bytes(1024))
    assert attend(1024) == AwayDone()


def test_native_code_gets_rows_of_one_token_in_layers_that_exist(exchange: LoanExchange) -> None:
    kernels = kernels_for(EngineConfig())
    assert kernels is not None
    pool, empty = PagePool(2 * 512 * 8, 512), torch.empty(0, dtype=torch.int64)
    query, key = torch.zeros(2, HEADS, WIDTH), torch.zeros(2, KV_HEADS, WIDTH)

    def decoding(spans: tuple[RowSpan, ...], layer: int, how: AttentionSettings) -> object:
        tables = torch.zeros(len(spans), LAYERS, 1, dtype=torch.int64)
        lengths = torch.tensor([span.length for span in spans])
        paging = PagedMetadata(pool, PAGE, None, spans, tables, lengths, empty.view(1, 0), empty, None)
        return NativeAttention(kernels, paging).decoding(layer, Tokens(query, key, key, how))

    rows, how = (RowSpan(0, 1, 1), RowSpan(1, 2, 2)), AttentionSettings()
    assert decoding(rows, 0, how) is not None and decoding(rows, LAYERS - 1, how) is not None
    assert decoding(rows, LAYERS, how) is None and decoding(rows, -1, how) is None
    assert decoding((RowSpan(0, 2, 0),), 0, how) is None
    assert decoding(rows, 0, AttentionSettings(window=2)) is None
    assert decoding(rows, 0, AttentionSettings(scaling=-1.0)) is None


def test_only_parts_of_this_shape_are_copied() -> None:
    part = PartialAttention.empty(torch.zeros(1, HEADS, WIDTH))
    values, sums = torch.randn(1, HEADS, WIDTH).double(), torch.randn(1, HEADS, 2).double()
    right = [Array("float64", tuple(each.shape), each.numpy().tobytes()) for each in (values, sums)]
    assert part.take_bytes(right)
    assert torch.equal(part.values, values) and torch.equal(part.sums, sums)
    wrong = Array("float32", (1, HEADS, WIDTH), bytes(4 * HEADS * WIDTH))
    for arrays in ([wrong, right[1]], right[:1], right[::-1], [Array("float64", (1, HEADS, WIDTH), b""), right[1]]):
        assert not part.take_bytes(arrays)
