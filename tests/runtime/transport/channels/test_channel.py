"""`DualChannel` sends short messages over a Unix socket and long ones over zmq, and appears as one channel."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.chains import Array
from runtime.messages import Heartbeat, PageData
from runtime.transport.channels.channel import DualChannel, ReorderBuffer, ZmqChannel
from runtime.transport.channels.seqpacket import AVAILABLE, MAX_BYTES, SUFFIX, SeqpacketSocket
from runtime.transport.messenger import Envelope, Messenger, PeerCut
from runtime.transport.wire import Frame, encode

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="SKIPPED: there are no packets of AF_UNIX here, or no epoll")

LIMIT = 60.0


class Full(ZmqChannel):
    """A zmq channel that never has room and receives nothing."""

    closed = False  # type: ignore[assignment]

    def __init__(self) -> None:
        self.asked = 0

    @property
    def polled(self) -> tuple[()]:  # type: ignore[override]
        return ()

    def put(self, frames: list[Frame], to: bytes = b"") -> bool:
        self.asked += 1
        return False

    def receive(self) -> Iterator[tuple[bytes, list[memoryview]]]:
        yield from ()

    def close(self, linger_ms: int) -> None:
        pass


class Brings(Full):
    """A zmq channel that receives what the test puts in `lots`."""

    def __init__(self) -> None:
        super().__init__()
        self.lots: list[tuple[bytes, list[memoryview]]] = []

    def receive(self) -> Iterator[tuple[bytes, list[memoryview]]]:
        lots, self.lots = self.lots, []
        yield from lots


def message(number: int, nbytes: int = 0) -> list[Frame]:
    arrays = (Array("uint8", (1, nbytes), bytes(nbytes)),) if nbytes else ()
    return encode(number, PageData(number, "s", 1, 0, 1, "d") if nbytes else Heartbeat(number), arrays)


def views(frames: list[Frame]) -> list[memoryview]:
    return [memoryview(each) for each in frames]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[SeqpacketSocket, SeqpacketSocket]]:
    inbox, line = SeqpacketSocket(), SeqpacketSocket()
    inbox.listen(f"{tmp_path}/x")
    assert line.dial(f"{tmp_path}/x", b"a/1/main")
    yield inbox, line
    line.close()
    inbox.close()


def test_a_short_message_does_not_take_the_road(pair: tuple[SeqpacketSocket, SeqpacketSocket]) -> None:
    inbox, line = pair
    channel = Full()
    sender, receiver = DualChannel(channel, line), DualChannel(Full(), inbox)
    assert sender.put(message(0))
    assert sender.put(message(1, MAX_BYTES // 2))
    assert channel.asked == 0
    assert [who for who, _ in receiver.receive()] == [b"a/1/main"] * 2
    assert receiver.put(message(0), b"a/1/main")
    assert [(who, bytes(frames[0])) for who, frames in sender.receive()] == [(b"", bytes(message(0)[0]))]
    assert not sender.put(message(2, MAX_BYTES)) and channel.asked == 1


def test_a_queue_that_is_full_takes_nothing_and_loses_nothing(pair: tuple[SeqpacketSocket, SeqpacketSocket]) -> None:
    inbox, line = pair
    sent = 0
    while line.put(b"", message(sent, 1 << 16)):
        sent += 1
        assert sent < 10_000
    assert sent > 1
    assert [bytes(frames[0]) for _, frames in inbox.receive(sent + 1)] == [
        bytes(message(number, 1 << 16)[0]) for number in range(sent)
    ]
    assert line.put(b"", message(sent))


def test_long_and_short_messages_come_in_order_both_ways(tmp_path: Path) -> None:
    chance = random.Random(7)
    inbox, line = Messenger("scheduler", bind=f"unix://{tmp_path}/s"), Messenger("a", 1)
    line.learn("scheduler", 0, inbox.address)
    line.send("scheduler", Heartbeat(0))
    while not inbox.knows("a"):
        inbox.receive(0.05)
    for sender, to, receiver in ((line, "scheduler", inbox), (inbox, "a", line)):
        got: list[tuple[int, int]] = []
        wanted = [(number, chance.choice((0, 1, 1000, MAX_BYTES, 3 * MAX_BYTES, 1 << 20))) for number in range(300)]
        for number, nbytes in wanted:
            assert sender.send(to, PageData(number, "s", 1, 0, 1, "d"), (Array("uint8", (1, nbytes), bytes(nbytes)),))
            if chance.random() < 0.2:
                got += taken(receiver)
        end = time.monotonic() + LIMIT
        while len(got) < len(wanted) and time.monotonic() < end:
            sender.receive(0)
            got += taken(receiver)
        assert got == wanted
    line.close()
    inbox.close()


def taken(messenger: Messenger) -> list[tuple[int, int]]:
    items = messenger.receive(0.01)
    assert all(isinstance(item, Envelope) for item in items), items
    return [(item.message.move, len(item.arrays[0].data)) for item in items if isinstance(item.message, PageData)]  # type: ignore[union-attr]


@given(st.lists(st.booleans(), max_size=60), st.randoms(use_true_random=False))
def test_what_goes_two_ways_is_heard_in_order(ways: list[bool], chance: random.Random) -> None:
    """Each way keeps its order; between the two ways any message may come first."""
    order, heard = ReorderBuffer(), []
    lots = [
        [n for n, quick in enumerate(ways) if quick],
        [n for n, quick in enumerate(ways) if not quick],
    ]
    while lots[0] or lots[1]:
        lot = chance.choice([lot for lot in lots if lot])
        number = lot.pop(0)
        heard += order.put_in_order(number, [memoryview(bytes([number]))], 0.0)
        assert [bytes(frames[0])[0] for frames in heard] == list(range(len(heard)))
    assert len(heard) == len(ways) and not order.ahead


def test_what_never_comes_is_not_waited_for_for_ever(pair: tuple[SeqpacketSocket, SeqpacketSocket]) -> None:
    inbox, line = pair
    now = [0.0]
    receiver = DualChannel(Full(), inbox, lambda: now[0])
    for number in (0, 2, 3):  # 1 would have come over the zmq channel
        assert line.put(b"", message(number))
    assert [bytes(frames[0]) for _, frames in receiver.receive()] == [bytes(message(0)[0])]
    assert not receiver.late
    now[0] = 11.0
    assert receiver.late
    assert [bytes(frames[0]) for _, frames in receiver.receive()] == [bytes(message(number)[0]) for number in (2, 3)]
    assert not receiver.late


@pytest.mark.parametrize("together", [False, True])
def test_the_first_message_may_come_by_road(pair: tuple[SeqpacketSocket, SeqpacketSocket], together: bool) -> None:
    inbox, line = pair
    channel = Brings()
    receiver, heard = DualChannel(channel, inbox), []
    channel.lots.append((b"a/1/main", views(message(0, MAX_BYTES))))
    if not together:
        heard += list(receiver.receive())
    for number in (1, 2):
        assert line.put(b"", message(number))
    heard += list(receiver.receive())
    assert [bytes(frames[0]) for _, frames in heard] == [
        bytes(message(number, 0 if number else MAX_BYTES)[0]) for number in range(3)
    ]


def test_what_was_sent_before_its_sender_ended_is_heard(pair: tuple[SeqpacketSocket, SeqpacketSocket]) -> None:
    inbox, line = pair
    channel = Brings()
    receiver = DualChannel(channel, inbox)
    assert line.put(b"", message(1))
    line.close()
    assert list(receiver.receive()) == []
    channel.lots.append((b"a/1/main", views(message(0, MAX_BYTES))))
    assert len(list(receiver.receive())) == 2
    assert not receiver.put(message(0), b"a/1/main")


def test_where_nobody_listens_the_road_takes_all(tmp_path: Path) -> None:
    scheduler, agent = Messenger("scheduler", bind=f"ipc://{tmp_path}/s"), Messenger("a", 1)
    agent.learn("scheduler", 0, scheduler.address.replace("ipc:", "unix:"))
    for number in range(50):
        assert agent.send("scheduler", Heartbeat(number))
    got: list[int] = []
    end = time.monotonic() + LIMIT
    while len(got) < 50 and time.monotonic() < end:
        got += [
            item.message.stalled_ms
            for item in scheduler.receive(0.05)
            if isinstance(item, Envelope) and isinstance(item.message, Heartbeat)
        ]
    assert got == list(range(50))
    agent.close()
    scheduler.close()


@pytest.mark.parametrize(
    "packets",
    [
        [b"scheduler/0/main", struct.pack("=2I", 1, 1) + b"x"],
        [b"../x/0/main", struct.pack("=2I", 1, 1) + b"x"],
        [b"c/1/main", b"?"],
        [b"c/1/main", struct.pack("=I", 1 << 31)],
        [b"c/1/main", struct.pack("=2I", 1, 5) + b"four"],
        [b"c/1/main", struct.pack("=I", 0)],
        [b"c/1/main", b""],
        [],
    ],
)
def test_who_speaks_otherwise_disturbs_nobody(tmp_path: Path, packets: list[bytes]) -> None:
    agent, friend = Messenger("a", 1, f"unix://{tmp_path}/a"), Messenger("b", 1)
    agent.learn("scheduler", 0, f"unix://{tmp_path}/s", calls=False)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(f"{tmp_path}/a{SUFFIX}")
    for packet in packets:
        stranger.send(packet)
    friend.learn("a", 1, agent.address)
    friend.send("a", Heartbeat(1))
    items: list[Envelope | PeerCut] = []
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        items += agent.receive(0.05)
    assert [item.sender for item in items if isinstance(item, Envelope)] == ["b"]
    assert all(isinstance(item, Envelope) or item.peer == "c" for item in items)
    stranger.close()
    friend.close()
    agent.close()


def test_an_address_that_was_left_behind_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / f"a{SUFFIX}").write_text("")
    agent, friend = Messenger("a", 1, f"unix://{tmp_path}/a"), Messenger("b", 1)
    friend.learn("a", 1, agent.address)
    friend.send("a", Heartbeat(1))
    (envelope,) = agent.receive(LIMIT)
    assert isinstance(envelope, Envelope) and envelope.sender == "b"
    friend.close()
    agent.close()
    assert not (tmp_path / f"a{SUFFIX}").exists()
