"""`TensorLink`, a messenger with a tensor transport beside it.

Covers order, tensors that do not come, forged announcements, the host path, and incarnations.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from runtime.chains import Array
from runtime.messages import (
    SCHEDULER,
    ForwardRows,
    LostLayers,
    MendPages,
    Message,
    MigrationFailed,
    PageData,
    PageRequest,
    RendezvousKey,
    RowsLost,
    Shutdown,
)
from runtime.transport.checksums import ArrayChecksums, digest_of
from runtime.transport.interfaces import PeerNotice
from runtime.transport.messenger import Envelope, Messenger, PeerCut
from runtime.transport.tensor_link import TensorLink
from tests.runtime.cluster.standin import StandIn

LIMIT = 60.0
ROW = ForwardRows(("s",), (1,), (1,), (4,), (1,), (True,), (2,))
STATE = Array("float32", (1, 2), bytes(range(8)))
PAGES = PageData(1, "s", 1, 0, 4, "d")
PAGE = Array("uint8", (1, 64), bytes(64))
WANT = PageRequest(1, "s", 1, (0, 2), 0, 4, "a")


@dataclass
class Two:
    """Agents a and b, with their fakes of the tensor transport, and the scheduler's messenger."""

    a: TensorLink
    b: TensorLink
    direct_a: StandIn
    direct_b: StandIn
    scheduler: Messenger
    post_a: Messenger
    post_b: Messenger

    def at_b(self, count: int, seconds: float = LIMIT) -> list[Envelope | PeerCut]:
        """Return the first `count` items that b delivers, or those that come in time."""
        out: list[Envelope | PeerCut] = []
        end = time.monotonic() + seconds
        while len(out) < count and time.monotonic() < end:
            self.a.receive(0)
            out += self.b.receive(0.01)
        return out

    def until_expected(self, *tickets: int) -> None:
        end = time.monotonic() + LIMIT
        while [ticket for _, ticket in self.direct_b.expected] != list(tickets):
            assert time.monotonic() < end, self.direct_b.expected
            assert self.at_b(1, 0.01) == []

    def lost(self) -> Message:
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            for item in self.scheduler.receive(0.02):
                if isinstance(item, Envelope) and isinstance(item.message, RowsLost | MigrationFailed):
                    return item.message
        raise AssertionError("nothing was told to be lost")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as stack:
        posts = [
            Messenger(name, 1 if name != SCHEDULER else 0, f"ipc://{tmp_path}/{name}") for name in ("a", "b", SCHEDULER)
        ]
        for messenger in posts:
            stack.callback(messenger.close)
        for messenger in posts[:2]:
            messenger.learn(SCHEDULER, 0, posts[2].address)
        directs = [StandIn(), StandIn()]
        ends = [
            TensorLink(name, messenger, direct) for name, messenger, direct in zip("ab", posts, directs, strict=False)
        ]
        ends[0].learn("b", 1, ends[1].address)
        ends[1].learn("a", 1, ends[0].address)
        for end, peer in zip(ends, "ba", strict=True):
            end.reach(peer, "rail")
        directs[0].links.add("b")
        directs[1].accepts.add("a")
        yield Two(ends[0], ends[1], directs[0], directs[1], posts[2], posts[0], posts[1])


def test_arrays_are_announced_and_come_with_their_message(two: Two) -> None:
    assert two.a.send("b", ROW, (STATE,))
    two.until_expected(1)
    assert two.direct_a.sent["b", 1] == (STATE,)
    two.direct_b.come("a", 1, [STATE])
    (envelope,) = two.at_b(1)
    assert isinstance(envelope, Envelope) and (envelope.message, envelope.arrays, envelope.ticket) == (
        ROW,
        (STATE,),
        None,
    )


def test_what_came_behind_an_announced_message_waits_for_it(two: Two) -> None:
    again = replace(ROW, starts=(5,), generated=(3,))
    two.a.send("b", ROW, (STATE,))
    two.a.send("b", WANT)
    two.a.send("b", again, (STATE,))  # sent as a delta on the link
    two.until_expected(1, 2)
    two.direct_b.come("a", 2, [STATE])  # the later one arrives first
    assert two.at_b(1, 0.1) == []
    two.direct_b.come("a", 1, [STATE])
    assert [item.message for item in two.at_b(3) if isinstance(item, Envelope)] == [ROW, WANT, again]


def test_another_peers_messages_do_not_wait(two: Two) -> None:
    two.a.send("b", ROW, (STATE,))
    two.until_expected(1)
    two.scheduler.learn("b", 1, two.b.address)
    two.scheduler.send("b", Shutdown())
    (envelope,) = two.at_b(1)
    assert isinstance(envelope, Envelope) and envelope.sender == SCHEDULER


def test_rows_whose_tensor_does_not_come_are_lost_and_what_is_behind_them_goes_on(two: Two) -> None:
    two.a.send("b", ROW, (STATE,))
    two.a.send("b", WANT)
    two.until_expected(1)
    two.direct_b.come("a", 1, error="it has not come within 1 s")
    (envelope,) = two.at_b(1)
    assert isinstance(envelope, Envelope) and envelope.message == WANT
    lost = two.lost()
    assert isinstance(lost, RowsLost) and (lost.device, lost.seqs, lost.epochs, lost.retry) == ("b", ("s",), (1,), True)
    assert "within 1 s" in lost.reason


def test_a_mend_whose_tensor_does_not_come_has_failed(two: Two) -> None:
    two.a.send("b", MendPages(3, "s", 1, (("b", 2),), (LostLayers(1, (0, 2)),), 16, (7,)), (STATE,))
    two.until_expected(1)
    two.direct_b.come("a", 1, error="gone")
    assert two.at_b(1, 0.1) == []
    failed = two.lost()
    assert isinstance(failed, MigrationFailed) and (failed.device, failed.move, failed.seq) == ("b", 3, "s")


def test_pages_whose_tensor_does_not_come_say_so(two: Two) -> None:
    two.a.send("b", PAGES, (PAGE,))
    two.until_expected(1)
    two.direct_b.come("a", 1, error="gone")
    (envelope,) = two.at_b(1)
    assert isinstance(envelope, Envelope) and isinstance(envelope.message, PageData)
    assert "gone" in envelope.message.error and envelope.arrays == ()


def test_who_announces_without_a_link_is_cut_off(two: Two) -> None:
    two.direct_b.accepts.clear()
    two.a.send("b", ROW, (STATE,))
    (cut,) = two.at_b(1)
    assert isinstance(cut, PeerCut) and cut.peer == "a" and "no link" in cut.reason
    assert two.direct_b.expected == [] and two.direct_b.forgotten == ["a"]
    assert any(isinstance(item, PeerCut) and item.denied for item in _within(two.a))  # and receives the reason


def test_a_ticket_that_was_used_is_a_forgery(two: Two) -> None:
    two.post_a.send("b", ROW, (STATE,), 7)
    two.until_expected(7)
    two.post_a.send("b", ROW, (STATE,), 7)
    (cut,) = two.at_b(1)
    assert isinstance(cut, PeerCut) and "ticket" in cut.reason


def test_more_than_can_come_is_a_forgery(two: Two) -> None:
    large = Array("uint8", (1 << 10, 1 << 20), None)
    for ticket in (1, 2, 3):
        two.post_a.send("b", PAGES, (large,), ticket)
    items = two.at_b(1)
    assert isinstance(items[0], PeerCut) and "more than can come" in items[0].reason
    assert len(two.direct_b.expected) == 2


def test_a_post_without_direct_links_refuses_what_is_announced(two: Two, tmp_path: Path) -> None:
    plain = Messenger("c", 1, f"ipc://{tmp_path}/c")
    try:
        two.post_a.learn("c", 1, plain.address)
        plain.learn("a", 1, two.post_a.address)
        two.post_a.send("c", ROW, (STATE,), 1)
        items = _within(plain)
        assert isinstance(items[0], PeerCut) and "directly" in items[0].reason
    finally:
        plain.close()


@pytest.mark.parametrize("why", ["no link yet", "other rails", "no rail", "nothing to carry"])
def test_what_cannot_go_directly_goes_by_the_host(two: Two, why: str) -> None:
    message, array = ROW, STATE
    if why == "no link yet":
        two.direct_a.links.clear()
    elif why == "nothing to carry":
        message, array = PAGES, Array("uint8", (0, 64), b"")
    else:
        two.a.reach("b", "another" if why == "other rails" else "")
    two.a.send("b", message, (array,))
    (envelope,) = two.at_b(1)
    assert isinstance(envelope, Envelope) and bytes(envelope.arrays[0].data) == array.data
    assert two.direct_a.offered == (["b"] if why == "no link yet" else [])
    assert not two.direct_a.sent and not two.direct_b.expected


def test_ends_of_links_hear_of_each_other_whoever_speaks_first(two: Two) -> None:
    two.direct_a.to_say = [PeerNotice("b", True, "token", b"1"), PeerNotice("b", False, "", b"", "over")]
    two.a.receive(0)
    assert two.at_b(1, 0.2) == []
    assert two.direct_b.heard == [("a", False, "token", b"1")]
    assert two.direct_b.ended == [("a", True, "over")]


def test_what_is_said_of_links_before_it_is_known_how_a_peer_can_be_reached_waits(two: Two) -> None:
    two.b.remove_peer("a")
    two.b.learn("a", 2, two.a.address)  # a later incarnation, for which `reach` has not been called yet
    later = Messenger("a", 2)
    try:
        later.learn("b", 1, two.b.address)
        later.send("b", RendezvousKey(True, "token", b"1"))
        assert _within(two.b, 0.3) == [] and two.direct_b.heard == []
        two.b.reach("a", "rail")
        assert two.direct_b.heard == [("a", False, "token", b"1")]
    finally:
        later.close()


def test_a_peer_that_cannot_be_linked_is_told_so(two: Two) -> None:
    two.b.reach("a", "another")
    two.direct_a.to_say = [PeerNotice("b", True, "token", b"1")]
    two.a.receive(0)
    end = time.monotonic() + LIMIT
    while not two.direct_a.ended and time.monotonic() < end:
        two.at_b(1, 0.01)
    assert two.direct_a.ended == [("b", True, "there can be no link")] and two.direct_b.heard == []


def test_a_life_that_is_over_leaves_nothing(two: Two) -> None:
    two.a.send("b", ROW, (STATE,))
    two.until_expected(1)
    two.b.remove_peer("a")
    assert two.direct_b.forgotten == ["a"]
    two.direct_b.come("a", 1, [STATE])
    assert two.at_b(1, 0.1) == []
    two.b.learn("a", 2, two.a.address)
    two.b.reach("a", "rail")
    two.direct_b.come("a", 1, [STATE])  # of the incarnation before
    assert two.at_b(1, 0.1) == []
    two.b.learn("a", 3, two.a.address)  # without `remove_peer` for the one before
    assert two.direct_b.forgotten == ["a", "a"]


def test_what_goes_directly_is_sealed_and_verified_where_it_lies(two: Two) -> None:
    array, digest = two.a.sealed("b", PAGE)
    assert digest.startswith("sum:") and two.b.verified(array, digest)
    assert not two.b.verified(Array("uint8", (1, 64), bytes(63) + b"\1"), digest)
    two.direct_a.links.clear()
    array, digest = two.a.sealed("b", ((STATE, 0, 1),))
    assert digest == digest_of(STATE) and ArrayChecksums().verified(array, digest) and two.b.verified(array, digest)


def test_state_is_what_links_are(two: Two) -> None:
    assert two.a.links() == (("b", "direct"),) and two.b.links() == ()


def _within(end: TensorLink | Messenger, seconds: float = 1.0) -> list[Envelope | PeerCut]:
    out: list[Envelope | PeerCut] = []
    until = time.monotonic() + seconds
    while not out and time.monotonic() < until:
        out += end.receive(0.02)
    return out
