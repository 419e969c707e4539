"""Messages that pass a messenger by as packets: numbered on, counted, and put back where they are not understood."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.chains import Array
from runtime.loans import LoanQuery, PacketHead
from runtime.messages import AttendLoans, LoansAttended, Message
from runtime.transport.channels.seqpacket import MAX_BYTES, PACKET_BYTES
from runtime.transport.messenger import Envelope, Messenger
from runtime.transport.packets import PacketLink, head_of, numbered

ASKED = AttendLoans(0, LoanQuery(((1,),), ((8,),), (1,), 0))


def array(text: bytes) -> Array:
    return Array("uint8", (1, 1, len(text)), text)


def head(message: Message, text: bytes) -> PacketHead:
    made = head_of(message, (array(text),))
    assert made is not None
    return made


class Pair:
    """A messenger `a` that has called `b`, and been answered: both have packets of each other."""

    def __init__(self, folder: Path, kind: str = "unix") -> None:
        self.b = Messenger("b", 1, f"{kind}://{folder}/b")
        self.a = Messenger("a", 1)
        self.a.learn("b", 1, self.b.address, calls=False)
        self.a.send("b", ASKED, (array(b"first"),))
        self.came(self.b, 1)
        self.b.send("a", LoansAttended(0), (array(b"first"),))
        self.came(self.a, 1)

    def links(self) -> tuple[PacketLink, PacketLink]:
        to_b, to_a = self.a.packets("b"), self.b.packets("a")
        assert to_b is not None and to_a is not None
        return to_b, to_a

    @staticmethod
    def came(to: Messenger, count: int) -> list[bytes]:
        """Return the texts of the next messages."""
        out: list[bytes] = []
        for _ in range(100):
            if len(out) >= count:
                break
            for item in to.receive(0.05):
                assert isinstance(item, Envelope), item
                out.append(bytes(item.arrays[0].data))
        return out

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def test_messages_of_both_ways_go_on_from_each_other(pair: Pair) -> None:
    to_b, to_a = pair.links()
    for number in range(1, 6, 2):
        assert to_b.send(head(ASKED, b"short"), b"short")
        pair.a.send("b", ASKED, (array(b"long" * MAX_BYTES),))  # too long for a packet
        assert pair.came(pair.b, 2) == [b"short", b"long" * MAX_BYTES]
        place = to_a.find_place()
        assert place is not None and place[1:] == (number + 2, (number + 1) // 2)
        assert to_a.send(head(LoansAttended(0), b"reply"), b"reply")
        assert pair.came(pair.a, 1) == [b"reply"]


def test_what_is_read_elsewhere_is_counted_or_put_back(pair: Pair) -> None:
    to_b, to_a = pair.links()
    texts = [b"one", b"two", b"six", b"ten"]
    for text in texts:
        assert to_b.send(head(ASKED, text), text)
    end = to_a._channel._seqpacket.end(b"a/1/main")  # type: ignore[attr-defined]
    assert end.recv(PACKET_BYTES) == numbered(head(ASKED, b"one"), 1) + b"one"
    to_a.count(1, 0)
    to_a.put_back(end.recv(PACKET_BYTES))
    assert to_a.find_place() is None, "what was put back is due first"
    assert not to_a.send(head(LoansAttended(0), b"no"), b"no")
    assert pair.came(pair.b, 3) == texts[1:]
    place = to_a.find_place()
    assert place is not None and place.due == 5


def test_an_empty_packet_that_is_put_back_ends_the_connection(pair: Pair) -> None:
    to_b, to_a = pair.links()
    to_a.put_back(b"")
    assert pair.b.receive(0.0) == []
    assert to_a.find_place() is None
    assert to_b.send(head(ASKED, b"lost"), b"lost") is False, "the other end is closed"
    pair.a.send("b", ASKED, (array(b"other way"),))
    assert pair.came(pair.b, 1) == [b"other way"]


def test_there_are_no_packets_of_a_cut_peer_or_of_other_channels(pair: Pair, tmp_path: Path) -> None:
    to_b, to_a = pair.links()
    pair.b.deny("a", "go")
    assert to_a.find_place() is None
    assert pair.b.packets("a") is None
    assert pair.b.packets("c") is None
    (tmp_path / "ipc").mkdir()
    plain = Pair(tmp_path / "ipc", "ipc")
    assert plain.a.packets("b") is None and plain.b.packets("a") is None
    plain.close()
    del to_b


def test_files_to_poll_are_those_of_all_links_but_the_given_ones(pair: Pair) -> None:
    _, to_a = pair.links()
    place = to_a.find_place()
    assert place is not None
    every, apart = pair.b.quiet_files(()), pair.b.quiet_files({b"a/1/main"})
    assert every is not None and apart is not None
    assert set(every) - set(apart) == {place.file}
    assert pair.a.quiet_files(()) is None, "it has a line"
    to_a.put_back(b"\0")
    assert pair.b.quiet_files(()) is None, "something is due"


def test_a_message_that_is_too_long_has_no_head() -> None:
    assert head_of(ASKED, (array(bytes(MAX_BYTES)),)) is None
