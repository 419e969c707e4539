"""Send and receive typed messages between processes: authenticated peers, in order for each pair, or a reason why not.

    inbox      peers that send to this process connect here and identify themselves (`name/incarnation/purpose`)
    links      one per peer that this process sends to, connected at the first message; a peer without an address is
               answered over the connection that it made, so agents need not be reachable for the scheduler

Both are channels (`transport.channels`).

Contract: one thread; only `wake` may be called from any. Nothing blocks but `receive`, and that no longer than its
timeout. A peer is *cut* when it sends what is no message, skips a number, does not read, or speaks another protocol: it
is sent the reason, everything else from it is dropped, and the user of the messenger is told once. An incarnation that
was forgotten or replaced is not accepted any more. No peer takes another's place by using its name: a later incarnation
waits until it is learnt, and where incarnations are `admitted` all other peers are rejected. Knows neither agents nor
schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import zmq

from runtime.chains import Array
from runtime.messages import Message, Rejected
from runtime.transport.channels.channel import Channel
from runtime.transport.channels.sockets import ADDRESS, Sockets, Waker
from runtime.transport.delta import DeltaDecoder
from runtime.transport.keys import Keys
from runtime.transport.peers import NAME, Peers, link
from runtime.transport.send_queue import Choked, SendQueue
from runtime.transport.validate import WireError, check_arrays, speaker
from runtime.transport.wire import OtherProtocol, Parcel, decode

#: Messages of lives that are not known yet which are kept for each peer.
_EARLY = 256
#: How soon what waits for a peer is tried again.
_RETRY_MS = 5
_LINGER_MS = 500


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message of a peer. `incarnation`: which life of it that is. `ticket`: under which its arrays come directly,
    without `data` here; None where they are here."""

    sender: str
    incarnation: int
    message: Message
    arrays: tuple[Array, ...] = ()
    ticket: int | None = None


@dataclass(frozen=True, slots=True)
class PeerCut:
    """Nothing more comes from a peer, or goes to it. `denied`: it was the peer that would not have us."""

    peer: str
    incarnation: int
    reason: str
    denied: bool = False


@dataclass(frozen=True, slots=True)
class MessengerSettings:
    """`backlog`: bytes that may wait for one peer in this process, beyond what the transport holds: `high_water`
    messages on each side.
    """

    backlog: int = 256 << 20
    high_water: int = 1000


@dataclass(slots=True)
class _Peer:
    """How a peer is reached in one incarnation. `line`: None where its own connection is used. `calls`: it may connect
    to this one.
    """

    incarnation: int
    address: str | None
    calls: bool = True
    outbox: SendQueue | None = None
    line: Channel | None = None


class Messenger:
    """See the top of the file.

    Args:
        name, incarnation: who this is.
        bind: where others reach it (`unix:///…`, `ipc:///…`, `tcp://host:*`, `inproc://…`), None for nowhere.
        keys: the cluster's; needed, and used, for tcp only.
        context: shared by posts of one process that speak `inproc`; else each makes its own.
        purpose: of several posts of one process and name: each has links of its own.
    """

    def __init__(
        self,
        name: str,
        incarnation: int = 0,
        bind: str | None = None,
        keys: Keys | None = None,
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        purpose: str = "main",
        settings: MessengerSettings | None = None,
    ) -> None:
        """Raises ValueError for a name or an address that is none, for tcp without keys; zmq.ZMQError if it cannot
        bind.
        """
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a process of a cluster")
        self._who = link(name, incarnation, purpose)
        self._settings = settings or MessengerSettings()
        self._sockets = Sockets(keys, context, self._settings.high_water)
        self._peers: dict[str, _Peer] = {}
        self._register = Peers()
        self._admits: Callable[[str, int], bool] = lambda name, incarnation: True
        self._early: dict[str, list[tuple[bytes, list[memoryview]]]] = {}
        #: By peer and link: what its short messages go on from.
        self._heard: dict[str, dict[bytes, DeltaDecoder]] = {}
        self._notices: list[Envelope | PeerCut] = []
        #: Whether messages may come whose arrays come otherwise.
        self.announced = False
        self._poller, self._waker = zmq.Poller(), Waker()
        self._poller.register(self._waker, zmq.POLLIN)
        self._carriers: dict[zmq.Socket[bytes] | int, Channel] = {}
        self._inbox: Channel | None = None
        self.address = ""
        if bind is not None:
            self._inbox, self.address = self._sockets.bound(bind)
            self._attend(self._inbox)

    # -- who is where ------------------------------------------------------------------------------------------------

    def admit(self, admits: Callable[[str, int], bool]) -> None:
        """From now on only these lives, by name and incarnation, are heard over the inbox; all others are denied."""
        self._admits = admits

    def learn(self, name: str, incarnation: int, address: str, *, calls: bool = True) -> None:
        """Where a peer is; it is connected when something is to go there. What is known already is nothing to do.

        `calls`: it may connect to this one, too; else whoever does in its name is not heard. Raises ValueError for
        addresses that are none.
        """
        if not NAME.fullmatch(name) or not ADDRESS.fullmatch(address):
            raise ValueError("a peer's name or address is none")
        known = self._peers.get(name)
        if self._register.outdated(name, incarnation) or (
            known is not None and (known.incarnation, known.address) == (incarnation, address)
        ):
            return
        self._close_peer(name)
        self._register.start_incarnation(name, incarnation)
        self._peers[name] = _Peer(incarnation, address, calls)
        for who, frames in self._early.pop(name, ()):
            if (item := self._read_inbox(who, frames)) is not None:
                self._notices.append(item)

    def remove_peer(self, name: str) -> None:
        """A peer is gone, in the incarnation that is known: what still comes of that is dropped. A later one is
        another.
        """
        known = self._peers.get(name)
        self._close_peer(name)
        self._register.end_incarnation(name, None if known is None else known.incarnation)
        self._heard.pop(name, None)

    def knows(self, name: str) -> bool:
        return name in self._peers

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, to: str, message: Message, arrays: Sequence[Array] = (), ticket: int | None = None) -> bool:
        """Hand a message over, in order behind those before; arrays must not change any more. `ticket`: under which
        they go otherwise.

        False if nothing goes to that peer any more: it is gone, or is cut now, and `receive` tells of that.
        """
        peer = self._peers.get(to)
        if peer is None:
            return False
        try:
            self._outbox(to, peer).send(message, arrays, ticket)
        except Choked as error:
            self._give_up(to, peer.incarnation, f"it does not read what is sent to it: {error}")
            return False
        except zmq.ZMQError as error:
            self._give_up(to, peer.incarnation, f"it cannot be reached: {error.strerror or error}")
            return False
        return True

    def deny(self, name: str, reason: str) -> None:
        """Cut a peer off, telling it why."""
        peer = self._peers.get(name)
        if peer is not None:
            self.send(name, Rejected(reason))
            self._register.cut(link(name, peer.incarnation), link(name, peer.incarnation, "link"))
            self._close_peer(name, _LINGER_MS)

    def prepare(self) -> None:
        """Make short work of what will most likely come and go next. To be called while there is nothing else to do."""
        for links in self._heard.values():
            for heard in links.values():
                heard.prepare()

    def wake(self) -> None:
        """End a `receive` that waits. From any thread."""
        self._waker.ring()

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, timeout: float) -> list[Envelope | PeerCut]:
        """All that is there; waits for the first up to `timeout` seconds."""
        flushed = self._flush()
        out, self._notices = self._notices, []
        wait = 0 if out else max(0, int(timeout * 1000))
        for source, _ in self._poller.poll(wait if flushed else min(wait, _RETRY_MS)):
            if source == self._waker.fileno():
                self._waker.quiet()
            elif source in self._carriers:  # not one that another one's message has just had cut
                out += self._read_channel(self._carriers[source])
        for late in {id(each): each for each in self._carriers.values() if each.late}.values():
            out += self._read_channel(late)
        out += self._notices
        self._notices = []
        return out

    def close(self) -> None:
        """Give what was sent a moment to go out, and let everything go."""
        self._flush()
        for name in list(self._peers):
            self._close_peer(name, _LINGER_MS)
        if self._inbox is not None:
            self._neglect(self._inbox, _LINGER_MS)
        self._waker.close()
        self._sockets.close()

    # -- inside: links -------------------------------------------------------------------------------------------------

    def _outbox(self, name: str, peer: _Peer) -> SendQueue:
        if peer.outbox is None:
            if peer.address is not None:
                peer.line = self._sockets.connected(peer.address, self._who)
                self._attend(peer.line)
                put = peer.line.put
            elif self._inbox is not None:
                put = partial(self._inbox.put, to=link(name, peer.incarnation))
            else:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            peer.outbox = SendQueue(put, self._settings.backlog)
        return peer.outbox

    def _flush(self) -> bool:
        """Whether nothing waits for anybody."""
        done = True
        for name, peer in list(self._peers.items()):
            if peer.outbox is not None and peer.outbox.waiting:
                try:
                    done &= peer.outbox.flush()
                except zmq.ZMQError as error:
                    self._give_up(name, peer.incarnation, f"it cannot be reached: {error.strerror or error}")
        return done

    # -- inside: what comes ------------------------------------------------------------------------------------------

    def _read_channel(self, carrier: Channel) -> Iterable[Envelope | PeerCut]:
        out: list[Envelope | PeerCut] = []
        for who, frames in carrier.receive():
            item = (
                self._read_inbox(who, frames)
                if carrier is self._inbox
                else self._read(self._other_end(carrier), frames)
            )
            if item is not None:
                out.append(item)
            if carrier.closed:  # what it brought has just had it cut
                break
        return out

    def _read_inbox(self, who: bytes, frames: list[memoryview]) -> Envelope | PeerCut | None:
        """What came over the inbox, where whoever connects says himself who he is."""
        heard = self._register.identify_link(who)
        if heard is None:
            return None
        name, incarnation = heard
        if not self._admits(name, incarnation):
            self._turn_away(who, f"nobody waits for {name} in its life {incarnation}")
            return None
        known = self._peers.get(name)
        if known is not None and not known.calls:
            return None
        unknown = (
            name in self._early if known is None else known.address is not None and incarnation > known.incarnation
        )
        if unknown:
            early = self._early.setdefault(name, [])
            if len(early) < _EARLY:  # what is left out is missed, and cut, when that life is learnt
                early.append((who, frames))
            return None
        return self._read(who, frames)

    def _turn_away(self, who: bytes, reason: str) -> None:
        if self._inbox is not None:
            with suppress(zmq.ZMQError, Choked):
                SendQueue(partial(self._inbox.put, to=who), 0).send(Rejected(reason))

    def _other_end(self, line: Channel) -> bytes:
        name, peer = next((name, peer) for name, peer in self._peers.items() if peer.line is line)
        return link(name, peer.incarnation, "link")

    def _read(self, who: bytes, frames: list[memoryview]) -> Envelope | PeerCut | None:
        """What a message says, if whoever sent it is to be heard."""
        heard = self._register.identify_link(who)
        if heard is None:
            return None
        name, incarnation = heard
        try:
            parcel = decode(frames)
            self._register.count(who, parcel.number)
            message = self._full(name, who, parcel)
            if speaker(message) not in (None, name):
                raise WireError("it is said in another's name")
            if parcel.ticket is not None and not self.announced:
                raise WireError("its arrays are to come directly, and there is no link for that")
        except WireError as error:
            return self._refuse(who, name, incarnation, error)
        self._update_peer(name, incarnation)
        if isinstance(message, Rejected):
            self._register.cut(who)
            self._close_peer(name)
            return PeerCut(name, incarnation, message.reason, denied=True)
        return Envelope(name, incarnation, message, parcel.arrays, parcel.ticket)

    def _full(self, name: str, who: bytes, parcel: Parcel) -> Message:
        """What a message says, said in full. Raises WireError."""
        links = self._heard.setdefault(name, {})
        heard = links.get(who)
        if heard is None:
            for over in [each for each in links if self._register.identify_link(each) is None]:
                del links[over]  # earlier lives go with their bases
            heard = links[who] = DeltaDecoder()
        message = heard.full(parcel.message)
        if message is None:
            raise WireError("it goes on from a message that never came")
        if message is not parcel.message:
            check_arrays(message, parcel.arrays)
        return message

    def _update_peer(self, name: str, incarnation: int) -> None:
        """Whoever speaks and has no address is answered the way it came. A new life of a peer ends the one before."""
        known = self._peers.get(name)
        if known is None or known.incarnation < incarnation:
            self._close_peer(name)
            self._register.start_incarnation(name, incarnation)
            self._peers[name] = _Peer(incarnation, None)

    def _refuse(self, who: bytes, name: str, incarnation: int, error: WireError) -> PeerCut:
        """Cut a peer off, and tell it why, the way its message came."""
        self._update_peer(name, incarnation)
        reason = str(error) if isinstance(error, OtherProtocol) else f"what it sent cannot be taken: {error}"
        if who.endswith(b"/link"):
            self.send(name, Rejected(reason))
        elif self._inbox is not None:
            with suppress(zmq.ZMQError, Choked):
                self._denial_outbox(name, who, self._inbox).send(Rejected(reason))
        self._register.cut(who)
        self._close_peer(name, _LINGER_MS)
        return PeerCut(name, incarnation, reason)

    def _denial_outbox(self, name: str, who: bytes, inbox: Channel) -> SendQueue:
        """Over the connection that it made: its numbers go on there, where there have been any."""
        peer = self._peers[name]
        if peer.address is None and who.endswith(b"/main"):
            return self._outbox(name, peer)
        return SendQueue(partial(inbox.put, to=who), self._settings.backlog)

    def _give_up(self, name: str, incarnation: int, reason: str) -> None:
        self._close_peer(name)
        self._notices.append(PeerCut(name, incarnation, reason))

    def _close_peer(self, name: str, linger: int = 0) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None and peer.line is not None:
            self._neglect(peer.line, linger)

    def _attend(self, carrier: Channel) -> None:
        for each in carrier.polled:
            self._carriers[each] = carrier
            self._poller.register(each, zmq.POLLIN)

    def _neglect(self, carrier: Channel, linger: int) -> None:
        for each in carrier.polled:
            del self._carriers[each]
            self._poller.unregister(each)
        carrier.close(linger)
