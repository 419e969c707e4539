"""Links between processes: order, replies, strangers, other versions, and peers that fail.

Peers die, stop reading, or send nonsense.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace

from runtime.chains import Array
from runtime.messages import PROTOCOL, AgentStats, ForwardRows, Heartbeat, PageData, PageRequest, Rejected, Shutdown
from runtime.transport.delta import ForwardRowsDelta
from runtime.transport.keys import Keys
from runtime.transport.messenger import Envelope, Messenger, MessengerSettings, PeerCut
from runtime.transport.peers import Peers, link
from runtime.transport.wire import decode, encode

KEYS = Keys.make()
ROW, STATE = ForwardRows(("s",), (1,), (1,), (4,), (1,), (True,), (2,)), Array("float32", (1, 2), bytes(8))
LIMIT = 60.0


@pytest.fixture(params=["unix", "ipc"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Messenger]]:
    """Make messengers that are closed at the end of the test.

    Without an address of their own they get a socket in the test's folder.
    """
    with ExitStack() as stack:

        def make(name: str, incarnation: int = 0, bind: str | None = "", **options: object) -> Messenger:
            where = f"{request.param}://{tmp_path}/{name}.{incarnation}" if bind == "" else bind
            messenger = Messenger(name, incarnation, where, **options)  # type: ignore[arg-type]
            stack.callback(messenger.close)
            return messenger

        yield make


def taken(
    messenger: Messenger, count: int, seconds: float = LIMIT, sender: Messenger | None = None
) -> list[Envelope | PeerCut]:
    """Receive the next `count` items, or those that come in time.

    `sender` is polled too, since a messenger sends its queued messages while it receives.
    """
    out: list[Envelope | PeerCut] = []
    end = time.monotonic() + seconds
    while len(out) < count and time.monotonic() < end:
        if sender is not None:
            sender.receive(0)
        out += messenger.receive(0.02)
    return out


def heard(messenger: Messenger, count: int, sender: Messenger | None = None) -> list[int]:
    items = taken(messenger, count, sender=sender)
    assert all(isinstance(item, Envelope) for item in items), items
    return [
        item.message.stalled_ms for item in items if isinstance(item, Envelope) and isinstance(item.message, Heartbeat)
    ]


@pytest.mark.parametrize(("bind", "keys"), [("", None), ("tcp://127.0.0.1:*", KEYS)], ids=["ipc", "tcp"])
def test_messages_come_in_order_and_replies_go_back_over_the_same_connection(
    made: Callable[..., Messenger], bind: str, keys: Keys | None
) -> None:
    scheduler, agent = made("scheduler", bind=bind, keys=keys), made("a", 4, bind=None, keys=keys)
    agent.learn("scheduler", 0, scheduler.address)
    for number in range(1000):
        assert agent.send("scheduler", Heartbeat(number))
    assert heard(scheduler, 1000, agent) == list(range(1000))
    assert scheduler.knows("a")
    for number in range(1000):
        assert scheduler.send("a", Heartbeat(number))
    assert heard(agent, 1000, scheduler) == list(range(1000))


def test_agents_reach_each_other_both_ways_with_arrays(made: Callable[..., Messenger]) -> None:
    a, b = made("a", 1), made("b", 2)
    a.learn("b", 2, b.address)
    b.learn("a", 1, a.address)
    data = bytes(range(256)) * 4096
    for one, other in ((a, b), (b, a)):
        other_name = "b" if other is b else "a"
        one.send(other_name, PageData(1, "s", 1, 0, 4, "d"), (Array("uint8", (4, len(data) // 4), data),))
        (envelope,) = taken(other, 1)
        assert (
            isinstance(envelope, Envelope)
            and envelope.arrays[0].shape == (4, len(data) // 4)
            and bytes(envelope.arrays[0].data) == data
        )
        assert (envelope.sender, envelope.incarnation) == (("a", 1) if one is a else ("b", 2))


def test_threads_of_one_process_speak_without_files() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    one, other = Messenger("a", bind="inproc://a", context=context), Messenger("b", context=context)
    other.learn("a", 0, one.address)
    other.send("a", Heartbeat(7))
    assert heard(one, 1) == [7]
    one.close()
    other.close()
    context.term()


def test_a_stranger_is_not_heard(made: Callable[..., Messenger]) -> None:
    scheduler = made("scheduler", bind="tcp://127.0.0.1:*", keys=KEYS)
    stranger, friend = made("a", bind=None, keys=Keys.make()), made("b", bind=None, keys=KEYS)
    context = zmq.Context()
    plain, half = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    own_public, own_secret = zmq.curve_keypair()  # has the cluster's public key, and a key pair of its own
    half.curve_serverkey, half.curve_publickey, half.curve_secretkey = KEYS.public.encode(), own_public, own_secret
    for name, socket in ((b"c/0/main", plain), (b"d/0/main", half)):
        socket.setsockopt(zmq.ROUTING_ID, name)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(scheduler.address)
        socket.send_multipart(encode(0, Heartbeat(1)))
    for messenger in (stranger, friend):
        messenger.learn("scheduler", 0, scheduler.address)
        messenger.send("scheduler", Heartbeat(2))
    assert [item.sender for item in taken(scheduler, 2, seconds=1.0) if isinstance(item, Envelope)] == ["b"]
    context.destroy(0)


def test_without_a_doorkeeper_nobody_comes_in() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inside, half = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    KEYS.guard(inside)
    port = inside.bind_to_random_port("tcp://127.0.0.1")
    half.curve_serverkey = KEYS.public.encode()
    half.curve_publickey, half.curve_secretkey = zmq.curve_keypair()
    half.connect(f"tcp://127.0.0.1:{port}")
    half.send(b"hello")
    assert not inside.poll(300)
    context.destroy(0)


def test_a_post_that_cannot_listen_leaves_nothing() -> None:
    before = set(threading.enumerate())
    with pytest.raises(zmq.ZMQError):
        Messenger("a", bind="tcp://192.0.2.1:*", keys=KEYS)
    assert not set(threading.enumerate()) - before


def test_nothing_goes_over_the_network_without_keys(made: Callable[..., Messenger]) -> None:
    with pytest.raises(ValueError, match="without the cluster's keys"):
        Messenger("a", bind="tcp://127.0.0.1:*")
    with pytest.raises(ValueError, match="one pair"):
        Keys(KEYS.public, Keys.make().secret)
    assert KEYS.secret not in repr(KEYS)


@pytest.mark.parametrize(
    "address", ["", "/tmp/x", "file:///etc/passwd", "tcp://", "ipc://relative", "tcp://a b:1", "ipc:///" + "x" * 200]
)
def test_an_address_that_is_none_is_not_learnt(made: Callable[..., Messenger], address: str) -> None:
    with pytest.raises(ValueError):
        made("a").learn("b", 0, address)


def raw(messenger: Messenger, who: bytes) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, who)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.connect(messenger.address.replace("unix:", "ipc:"))
    return socket


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"GET / HTTP/1.1\r\n\r\n"], "it is no message of a cluster"),
        ([struct.pack("<4sHxxQ", b"BZoo", PROTOCOL + 1, 0) + b"?"], f"it speaks protocol {PROTOCOL + 1}"),
        ([bytes(encode(0, Heartbeat(1))[0])[:-1] + b"\xc1"], "cannot be read"),
        (encode(5, Heartbeat(1)), "number 5 came where 0 was due"),
        (encode(0, ROW, (STATE,), ForwardRowsDelta(0)), "it goes on from a message that never came"),
        (encode(0, AgentStats("b", 0, 0, 0, 0, 0, ())), "it is said in another's name"),
        (encode(0, PageRequest(1, "s", 1, (0, 1), 0, 4, "b")), "it is said in another's name"),
    ],
)
def test_who_sends_nonsense_is_told_why_and_not_heard_again(
    made: Callable[..., Messenger], frames: list[bytes], reason: str
) -> None:
    scheduler, friend = made("scheduler"), made("b", bind=None)
    friend.learn("scheduler", 0, scheduler.address)
    socket = raw(scheduler, b"a/0/main")
    socket.send_multipart(frames)
    (cut,) = taken(scheduler, 1)
    assert isinstance(cut, PeerCut) and cut.peer == "a" and reason in cut.reason and not cut.denied
    told = decode(socket.recv_multipart()).message
    assert isinstance(told, Rejected) and reason in told.reason
    socket.send_multipart(encode(0, Heartbeat(1)))
    friend.send("scheduler", Heartbeat(2))
    assert [item.sender for item in taken(scheduler, 2, seconds=0.5) if isinstance(item, Envelope)] == ["b"]
    assert not scheduler.send("a", Shutdown())
    socket.close()


def test_decode_steps_are_heard_in_full_and_their_arrays_are_checked(made: Callable[..., Messenger]) -> None:
    agent = made("b")
    socket = raw(agent, b"a/0/main")
    row = replace(ROW, batch=1)
    socket.send_multipart(encode(0, row, (STATE,)))
    socket.send_multipart(encode(1, row, (STATE,), ForwardRowsDelta(0)))
    socket.send_multipart(encode(2, row, (STATE,), ForwardRowsDelta(0)))
    mails = taken(agent, 3)
    assert [item.message for item in mails if isinstance(item, Envelope)] == [
        row,
        *(replace(row, starts=(4 + n,), generated=(2 + n,)) for n in (1, 2)),
    ]
    two = ForwardRows(("s", "t"), (1, 1), (1, 1), (4, 4), (1, 1), (True, True), (2, 2))
    socket.send_multipart(encode(3, two, (Array("float32", (2, 2), bytes(16)),), ForwardRowsDelta(0)))
    (cut,) = taken(agent, 1)
    assert isinstance(cut, PeerCut) and "disagree" in cut.reason, "hidden states of two rows, where there is one"
    socket.close()


def test_who_is_denied_hears_why(made: Callable[..., Messenger]) -> None:
    scheduler, agent = made("scheduler"), made("a", bind=None)
    agent.learn("scheduler", 0, scheduler.address)
    agent.send("scheduler", Heartbeat(0))
    taken(scheduler, 1)
    scheduler.send("a", Rejected("another version"))
    assert taken(agent, 1) == [PeerCut("scheduler", 0, "another version", denied=True)]
    assert not agent.send("scheduler", Heartbeat(1))


@pytest.mark.parametrize("who", [b"", b"a", b"a/b/main", b"../x/0/main", b"a/0/main/more", b"\xff/0/main"])
def test_who_has_no_name_is_not_heard(made: Callable[..., Messenger], who: bytes) -> None:
    scheduler = made("scheduler")
    socket = raw(scheduler, who) if who else zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(scheduler.address.replace("unix:", "ipc:"))
    socket.send_multipart(encode(0, Heartbeat(1)))
    assert taken(scheduler, 1, seconds=0.3) == []
    socket.close()


def test_a_later_life_ends_the_one_before(made: Callable[..., Messenger]) -> None:
    scheduler = made("scheduler")
    first, second = made("a", 1, bind=None), made("a", 2, bind=None)
    for messenger in (first, second):
        messenger.learn("scheduler", 0, scheduler.address)
    first.send("scheduler", Heartbeat(1))
    assert heard(scheduler, 1) == [1]
    second.send("scheduler", Heartbeat(2))
    assert heard(scheduler, 1) == [2]
    first.send("scheduler", Heartbeat(3))
    scheduler.send("a", Heartbeat(4))
    assert heard(second, 1) == [4]
    assert taken(scheduler, 1, seconds=0.3) == []
    scheduler.remove_peer("a")
    second.send("scheduler", Heartbeat(5))
    assert taken(scheduler, 1, seconds=0.3) == []
    assert not scheduler.send("a", Heartbeat(6))


def test_a_life_that_nobody_has_told_of_waits_until_somebody_does(made: Callable[..., Messenger]) -> None:
    """No process can take a peer's place as its next incarnation; early messages of the real one are kept."""
    one, first = made("b"), made("a", 1)
    one.learn("a", 1, first.address)
    first.learn("b", 0, one.address)
    next_one, forged = made("a", 2), made("a", 9, bind=None)
    for messenger in (next_one, forged):
        messenger.learn("b", 0, one.address)
    forged.send("b", Heartbeat(9))
    for number in range(3):
        next_one.send("b", Heartbeat(20 + number))
    assert taken(one, 1, seconds=0.3) == []
    first.send("b", Heartbeat(1))
    assert heard(one, 1) == [1]
    assert one.send("a", Heartbeat(2)) and heard(first, 1) == [2]
    one.remove_peer("a")
    next_one.send("b", Heartbeat(23))
    assert taken(one, 1, seconds=0.3) == []
    one.learn("a", 2, next_one.address)
    next_one.send("b", Heartbeat(24))
    assert heard(one, 5) == [20, 21, 22, 23, 24]
    assert one.send("a", Heartbeat(3)) and heard(next_one, 1) == [3]


def test_nobody_calls_in_the_name_of_a_peer_that_does_not_call(made: Callable[..., Messenger]) -> None:
    scheduler, agent = made("scheduler"), made("a", 1)
    agent.learn("scheduler", 0, scheduler.address, calls=False)
    for who in (b"scheduler/0/main", b"scheduler/1/main", b"scheduler/0/link"):
        socket = raw(agent, who)
        socket.send_multipart(encode(0, Shutdown()))
        assert taken(agent, 1, seconds=0.2) == []
        socket.close()
    assert agent.send("scheduler", Heartbeat(1)) and heard(scheduler, 1) == [1]
    assert scheduler.send("a", Heartbeat(2)) and heard(agent, 1) == [2]


def test_where_lives_are_admitted_others_are_denied_and_change_nothing(made: Callable[..., Messenger]) -> None:
    scheduler, agent = made("scheduler"), made("a", 1, bind=None)
    scheduler.admit(lambda name, incarnation: (name, incarnation) == ("a", 1))
    agent.learn("scheduler", 0, scheduler.address)
    agent.send("scheduler", Heartbeat(1))
    assert heard(scheduler, 1) == [1]
    for name, life in (("a", 2), ("z", 1)):
        other = made(name, life, bind=None)
        other.learn("scheduler", 0, scheduler.address)
        other.send("scheduler", Heartbeat(9))
        assert taken(scheduler, 1, seconds=0.2) == []
        assert taken(other, 1) == [PeerCut("scheduler", 0, f"{name} is not expected in its life {life}", denied=True)]
    agent.send("scheduler", Heartbeat(2))
    assert heard(scheduler, 1) == [2]
    assert scheduler.send("a", Heartbeat(3)) and heard(agent, 1) == [3]


def test_a_life_that_is_no_longer_admitted_is_told_so_under_the_number_that_is_due(
    made: Callable[..., Messenger],
) -> None:
    scheduler, agent, admitted = made("scheduler"), made("a", 1, bind=None), [True]
    scheduler.admit(lambda name, incarnation: admitted[0])
    agent.learn("scheduler", 0, scheduler.address)
    for number in range(3):
        agent.send("scheduler", Heartbeat(number))
        assert heard(scheduler, 1) == [number]
        assert scheduler.send("a", Heartbeat(number)) and heard(agent, 1) == [number]
    admitted[0] = False
    agent.send("scheduler", Heartbeat(9))
    assert taken(scheduler, 1, seconds=0.2) == []
    assert taken(agent, 1) == [PeerCut("scheduler", 0, "a is not expected in its life 1", denied=True)]


def test_another_link_that_is_not_admitted_is_told_so_from_number_0(made: Callable[..., Messenger]) -> None:
    """Of the same life: its main link has other numbers."""
    scheduler, agent, admitted = made("scheduler"), made("a", 1, bind=None), [True]
    scheduler.admit(lambda name, incarnation: admitted[0])
    agent.learn("scheduler", 0, scheduler.address)
    agent.send("scheduler", Heartbeat(1))
    assert heard(scheduler, 1) == [1]
    assert scheduler.send("a", Heartbeat(2)) and heard(agent, 1) == [2]
    admitted[0] = False
    beat = made("a", 1, bind=None, purpose="beat")
    beat.learn("scheduler", 0, scheduler.address)
    beat.send("scheduler", Heartbeat(3))
    assert taken(scheduler, 1, seconds=0.2) == []
    assert taken(beat, 1) == [PeerCut("scheduler", 0, "a is not expected in its life 1", denied=True)]
    admitted[0] = True
    assert scheduler.send("a", Heartbeat(4)) and heard(agent, 1) == [4]


def test_what_is_known_of_links_goes_with_their_lives() -> None:
    register = Peers()
    for life in range(50):
        for purpose in ("main", "beat"):
            register.count(link("a", life, purpose), 0)
        register.cut(link("a", life))
        assert register.identify_link(link("a", life)) is None and register.identify_link(link("a", life, "beat")) == (
            "a",
            life,
        )
        register.end_incarnation("a", life)
        assert register.identify_link(link("a", life, "beat")) is None
    assert not register._links["a"]


def test_a_peer_that_does_not_read_blocks_nobody_and_is_given_up(made: Callable[..., Messenger]) -> None:
    small = MessengerSettings(backlog=1 << 20, high_water=8)
    sender, sleeper, friend = made("s", settings=small), made("a", settings=small), made("b", settings=small)
    for messenger in (sleeper, friend):
        sender.learn("a" if messenger is sleeper else "b", 0, messenger.address)
    page = (Array("uint8", (1, 1 << 16), bytes(1 << 16)),)
    began, sent = time.monotonic(), 0
    while sender.send("a", PageData(1, "s", 1, 0, 1, "d"), page):
        sent += 1
        assert sent < 10_000
    assert time.monotonic() - began < LIMIT
    assert sender.send("b", Heartbeat(1)) and heard(friend, 1) == [1]
    (cut,) = taken(sender, 1)
    assert isinstance(cut, PeerCut) and cut.peer == "a" and "does not read" in cut.reason


def test_what_waits_goes_out_once_the_peer_reads(made: Callable[..., Messenger]) -> None:
    small = MessengerSettings(backlog=1 << 30, high_water=4)
    sender, slow = made("s", settings=small), made("a", settings=small)
    sender.learn("a", 0, slow.address)
    page = (Array("uint8", (1, 1 << 16), bytes(1 << 16)),)
    for number in range(200):
        assert sender.send("a", PageData(number, "s", 1, 0, 1, "d"), page)
    got: list[int] = []
    end = time.monotonic() + LIMIT
    while len(got) < 200 and time.monotonic() < end:
        sender.receive(0)
        got += [
            item.message.move
            for item in slow.receive(0.01)
            if isinstance(item, Envelope) and isinstance(item.message, PageData)
        ]
    assert got == list(range(200))


def test_a_peer_that_is_not_there_costs_nothing(made: Callable[..., Messenger], tmp_path: Path) -> None:
    messenger = made("a")
    messenger.learn("b", 0, f"ipc://{tmp_path}/nobody")
    assert messenger.send("b", Heartbeat(1))
    assert not messenger.send("c", Heartbeat(1))
    assert messenger.receive(0.0) == []


def test_a_wait_ends_when_it_is_woken(made: Callable[..., Messenger]) -> None:
    messenger = made("a")
    timer = threading.Timer(0.05, messenger.wake)
    timer.start()
    began = time.monotonic()
    assert messenger.receive(LIMIT) == []
    assert time.monotonic() - began < LIMIT / 2
    timer.join()
