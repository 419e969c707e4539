"""Send and receive typed messages between processes: authenticated peers, in order per connection, or a reason why not.

    inbox      peers that send to this process connect here and identify themselves (`name/incarnation/purpose`)
    lines      one per peer that this process sends to, connected at the first message; a peer without an address is
               answered over the connection that it made, so agents need not be reachable from the scheduler

Both are channels (`transport.channels`).

One thread uses a messenger; only `wake` may be called from any thread. Only `receive` blocks, up to its timeout.

A peer is *cut* when it sends an invalid message, skips a number, does not read, or uses another protocol: it is sent
the reason, everything else from it is dropped, and the caller of `receive` gets one PeerCut.

An incarnation that was removed or replaced is not accepted again. A peer cannot replace another by using its name: a
later incarnation waits until `learn` names it, and `admit` limits the incarnations that may connect at all. The
messenger does not distinguish agents from schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import zmq

from runtime.chains import Array
from runtime.messages import Message, Rejected
from runtime.transport.channels.channel import Channel, DualChannel
from runtime.transport.channels.sockets import ADDRESS, Sockets, Waker
from runtime.transport.delta import DeltaDecoder
from runtime.transport.keys import Keys
from runtime.transport.packets import PacketLink
from runtime.transport.peers import NAME, Peers, link
from runtime.transport.send_queue import Choked, SendQueue
from runtime.transport.validate import WireError, check_arrays, speaker
from runtime.transport.wire import OtherProtocol, Parcel, decode

#: Messages kept per peer from an incarnation that is not learnt yet.
_EARLY = 256
#: Interval at which queued messages are retried.
_RETRY_MS = 5
_LINGER_MS = 500


@dataclass(frozen=True, slots=True)
class Envelope:
    """Hold a received message.

    Fields:
        incarnation: Incarnation of the sender.
        ticket: Number under which the arrays arrive over a direct link; `arrays` then has no `data`. None: the arrays
            are here.
    """

    sender: str
    incarnation: int
    message: Message
    arrays: tuple[Array, ...] = ()
    ticket: int | None = None


@dataclass(frozen=True, slots=True)
class PeerCut:
    """Report that a peer is cut: nothing more comes from it or goes to it.

    Fields:
        denied: True if the peer rejected this process.
    """

    peer: str
    incarnation: int
    reason: str
    denied: bool = False


@dataclass(frozen=True, slots=True)
class MessengerSettings:
    """Configure a messenger.

    Fields:
        backlog: Bytes that may be queued for one peer in this process, beyond what the transport holds.
        high_water: Messages that the transport holds per peer, on each side.
    """

    backlog: int = 256 << 20
    high_water: int = 1000


@dataclass(slots=True)
class _Peer:
    """Hold how one incarnation of a peer is reached.

    Fields:
        address: None if messages to it go over the connection that it made.
        calls: It may connect to this process.
        line: Channel to its address; None before the first message, or without an address.
    """

    incarnation: int
    address: str | None
    calls: bool = True
    outbox: SendQueue | None = None
    line: Channel | None = None
    packets: PacketLink | None = None


class Messenger:
    """Send and receive messages of one process; see the module docstring.

    Args:
        name, incarnation: Identity of this process.
        bind: Address at which peers connect (`unix:///…`, `ipc:///…`, `tcp://host:*`, `inproc://…`); None for none.
        keys: The cluster's keys; required and used for tcp only.
        context: ZeroMQ context, shared by messengers of one process that use `inproc`; otherwise a new one.
        purpose: Distinguishes messengers of one process with the same name; each has its own links.
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
        """Bind the inbox.

        Raises ValueError for an invalid name or address, or for tcp without keys; zmq.ZMQError if it cannot bind.
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
        #: By peer and link: decoder of messages that are encoded as differences.
        self._heard: dict[str, dict[bytes, DeltaDecoder]] = {}
        self._notices: list[Envelope | PeerCut] = []
        #: Whether messages with arrays on a direct link are accepted.
        self.announced = False
        self._poller, self._waker = zmq.Poller(), Waker()
        self._poller.register(self._waker, zmq.POLLIN)
        self._carriers: dict[zmq.Socket[bytes] | int, Channel] = {}
        self._inbox: Channel | None = None
        self.address = ""
        if bind is not None:
            self._inbox, self.address = self._sockets.bound(bind)
            self._attend(self._inbox)

    # -- peers ---------------------------------------------------------------------------------------------------------

    def admit(self, admits: Callable[[str, int], bool]) -> None:
        """Accept only incarnations for which `admits(name, incarnation)` is true over the inbox; reject the rest."""
        self._admits = admits

    def learn(self, name: str, incarnation: int, address: str, *, calls: bool = True) -> None:
        """Register a peer's address; it is connected at the first message. Does nothing if the peer is already known.

        `calls`: the peer may connect to this process, too; otherwise connections in its name are ignored. Raises
        ValueError for an invalid name or address.
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
        """Remove a peer in its known incarnation.

        Later messages of that incarnation are dropped; later incarnations are not.
        """
        known = self._peers.get(name)
        self._close_peer(name)
        self._register.end_incarnation(name, None if known is None else known.incarnation)
        self._heard.pop(name, None)

    def knows(self, name: str) -> bool:
        return name in self._peers

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, to: str, message: Message, arrays: Sequence[Array] = (), ticket: int | None = None) -> bool:
        """Queue a message to a peer, in order. The arrays must not change any more.

        Returns False if the peer is gone or is cut now; `receive` reports a cut. `ticket`: the arrays go over a direct
        link under this number.
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
        """Send a peer a reason and cut it."""
        peer = self._peers.get(name)
        if peer is not None:
            self.send(name, Rejected(reason))
            self._register.cut(link(name, peer.incarnation), link(name, peer.incarnation, "link"))
            self._close_peer(name, _LINGER_MS)

    def prepare(self) -> None:
        """Precompute the messages that are likely to be received next. Call it while idle."""
        for links in self._heard.values():
            for heard in links.values():
                heard.prepare()

    def wake(self) -> None:
        """End a waiting `receive`. May be called from any thread."""
        self._waker.ring()

    def packets(self, name: str) -> PacketLink | None:
        """Return the packets of a peer to which a message has been sent; None if there are none."""
        peer = self._peers.get(name)
        if peer is None or peer.outbox is None or peer.packets is not None:
            return None if peer is None else peer.packets
        if isinstance(channel := peer.line or self._inbox, DualChannel):
            main, back = link(name, peer.incarnation), link(name, peer.incarnation, "link")
            ends = (main, main) if peer.line is None else (b"", back)
            peer.packets = PacketLink(channel, *ends, peer.outbox, self._register)
        return peer.packets

    def quiet_files(self, apart: Container[bytes]) -> list[int] | None:
        """Return the descriptors to poll instead of `receive`, but for these links of the inbox.

        None if `receive` may have something now, or for a messenger with lines.
        """
        if self._notices or not self._flush() or any(peer.line for peer in self._peers.values()):
            return None
        files = self._inbox.quiet_files(apart) if isinstance(self._inbox, DualChannel) else None
        return None if files is None else [self._waker.fileno(), *files]

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, timeout: float) -> list[Envelope | PeerCut]:
        """Return all available messages and cuts; wait up to `timeout` seconds for the first."""
        flushed = self._flush()
        out, self._notices = self._notices, []
        wait = 0 if out else max(0, int(timeout * 1000))
        for source, _ in self._poller.poll(wait if flushed else min(wait, _RETRY_MS)):
            if source == self._waker.fileno():
                self._waker.quiet()
            elif source in self._carriers:  # unless another message has just caused it to be cut
                out += self._read_channel(self._carriers[source])
        for late in {id(each): each for each in self._carriers.values() if each.late}.values():
            out += self._read_channel(late)
        out += self._notices
        self._notices = []
        return out

    def close(self) -> None:
        """Flush queued messages for a short time and close all sockets."""
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
        """Send queued messages; return whether none is left."""
        done = True
        for name, peer in list(self._peers.items()):
            if peer.outbox is not None and peer.outbox.waiting:
                try:
                    done &= peer.outbox.flush()
                except zmq.ZMQError as error:
                    self._give_up(name, peer.incarnation, f"it cannot be reached: {error.strerror or error}")
        return done

    # -- inside: received messages -------------------------------------------------------------------------------------

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
            if carrier.closed:  # its own message has just caused it to be cut
                break
        return out

    def _read_inbox(self, who: bytes, frames: list[memoryview]) -> Envelope | PeerCut | None:
        """Decode a message from the inbox, where a connecting peer states its own name."""
        heard = self._register.identify_link(who)
        if heard is None:
            return None
        name, incarnation = heard
        if not self._admits(name, incarnation):
            self._turn_away(name, incarnation, who)
            return None
        known = self._peers.get(name)
        if known is not None and not known.calls:
            return None
        unknown = (
            name in self._early if known is None else known.address is not None and incarnation > known.incarnation
        )
        if unknown:
            early = self._early.setdefault(name, [])
            # a dropped message is a gap in the numbers, for which the incarnation is cut once it is learnt
            if len(early) < _EARLY:
                early.append((who, frames))
            return None
        return self._read(who, frames)

    def _turn_away(self, name: str, incarnation: int, who: bytes) -> None:
        """Send a reason over the connection that a message came from; what is registered stays as it is."""
        if self._inbox is not None:
            reason = Rejected(f"{name} is not expected in its life {incarnation}")
            with suppress(zmq.ZMQError, Choked):
                self._denial_outbox(name, who, self._inbox).send(reason)

    def _other_end(self, line: Channel) -> bytes:
        name, peer = next((name, peer) for name, peer in self._peers.items() if peer.line is line)
        return link(name, peer.incarnation, "link")

    def _read(self, who: bytes, frames: list[memoryview]) -> Envelope | PeerCut | None:
        """Decode a message; None if its sender is cut or outdated."""
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
        """Return the message in full if it was encoded as a difference. Raises WireError."""
        links = self._heard.setdefault(name, {})
        heard = links.get(who)
        if heard is None:
            for over in [each for each in links if self._register.identify_link(each) is None]:
                del links[over]  # decoders of earlier incarnations
            heard = links[who] = DeltaDecoder()
        message = heard.full(parcel.message)
        if message is None:
            raise WireError("it goes on from a message that never came")
        if message is not parcel.message:
            check_arrays(message, parcel.arrays)
        return message

    def _update_peer(self, name: str, incarnation: int) -> None:
        """Register an unknown sender as a peer without address. A new incarnation replaces the previous one."""
        known = self._peers.get(name)
        if known is None or known.incarnation < incarnation:
            self._close_peer(name)
            self._register.start_incarnation(name, incarnation)
            self._peers[name] = _Peer(incarnation, None)

    def _refuse(self, who: bytes, name: str, incarnation: int, error: WireError) -> PeerCut:
        """Cut a peer after an invalid message, and send it the reason over the link that the message came from."""
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
        """Return a queue over the connection that the peer made; existing message numbers continue."""
        peer = self._peers.get(name)
        if peer is not None and (peer.address, link(name, peer.incarnation)) == (None, who):
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
