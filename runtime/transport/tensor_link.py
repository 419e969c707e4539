"""Send an agent's tensors past host memory where both ends can: a messenger and a TensorTransport side by side.

    send       message, arrays --> messenger: the message, the arrays' dtypes and shapes, a ticket
                                   direct link: the arrays
    receive    such a message waits until its arrays have arrived; later messages of the same peer wait behind it

A TensorLink is a `Link` (`transport.link`): a peer's messages are received in order, each once, with its arrays or not
at all. A direct link is started at the first array for a peer; until it stands, and after it failed, arrays go over the
messenger.

If announced arrays do not arrive, only their rows are lost: the scheduler receives RowsLost and runs them again, and
PageData is delivered with an error. A peer that announces arrays without a link, or under a wrong ticket, is cut. Only
`receive` waits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from runtime.chains import Array
from runtime.messages import (
    SCHEDULER,
    ForwardRows,
    LinkClosed,
    MendPages,
    Message,
    MigrationFailed,
    PageData,
    RendezvousKey,
    RowsLost,
)
from runtime.transport.checksums import ArrayChecksums
from runtime.transport.interfaces import CHECKSUM, ArrivedTensor, PeerNotice, TensorTransport
from runtime.transport.messenger import Envelope, Messenger, PeerCut
from runtime.transport.wire import MAX_FRAME_BYTES, nbytes_of

_log = logging.getLogger(__name__)

#: Rendezvous keys kept from a peer before its process group is known.
_EARLY = 16
#: Most bytes that one peer may have announced and not delivered. The sender's own limit
#: (`DirectConfig.max_inflight_bytes`) is far below it, except for memory that is not freed yet.
_MOST_ANNOUNCED = 2 << 30


@dataclass(slots=True)
class _Pair:
    """Hold the state of one incarnation of a peer.

    Fields:
        process_group: Its `TensorTransport.process_group`; None until `reach` sets it.
        early: Rendezvous keys received before that.
        sent, heard: Last ticket sent to it and received from it.
        held: Received messages that wait for arrays, or behind such a message, in order.
        missing: Bytes announced that have not arrived.
    """

    incarnation: int
    process_group: str | None = None
    early: list[RendezvousKey] = field(default_factory=list)
    sent: int = 0
    heard: int = 0
    held: deque[Envelope] = field(default_factory=deque)
    missing: int = 0


class TensorLink(ArrayChecksums):
    """Combine a messenger with direct links; see the module docstring. `device`: the device of this agent."""

    def __init__(self, device: str, messenger: Messenger, direct: TensorTransport) -> None:
        self._device, self._messenger, self._direct = device, messenger, direct
        self.address = messenger.address
        self._pairs: dict[str, _Pair] = {}
        self._through: list[Envelope | PeerCut] = []
        messenger.announced = True
        direct.begin(messenger.wake)

    @property
    def process_group(self) -> str:
        """Return the process group that a peer needs to be linked with this end."""
        return self._direct.process_group

    def links(self) -> tuple[tuple[str, str], ...]:
        """Return the state of the direct links, for `messages.AgentStats`."""
        return tuple(sorted(self._direct.state().items()))

    # -- peers ---------------------------------------------------------------------------------------------------------

    def learn(self, name: str, incarnation: int, address: str) -> None:
        known = self._pairs.get(name)
        if known is not None and known.incarnation != incarnation:
            self._let_go(name)
        self._pairs.setdefault(name, _Pair(incarnation))
        self._messenger.learn(name, incarnation, address)

    def reach(self, name: str, process_group: str) -> None:
        """Set the process group of a peer that was learnt."""
        pair = self._pairs[name]
        pair.process_group, early = process_group, pair.early
        pair.early = []
        for message in early:
            self._handle_rendezvous(name, pair, message)

    def remove_peer(self, name: str) -> None:
        self._let_go(name)
        self._messenger.remove_peer(name)

    def deny(self, name: str, reason: str) -> None:
        self._messenger.deny(name, reason)
        self._let_go(name)

    def wake(self) -> None:
        self._messenger.wake()

    def prepare(self) -> None:
        self._messenger.prepare()

    def close(self) -> None:
        """Close the direct links; the messenger is closed by its owner."""
        self._direct.close()

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, to: str, message: Message, arrays: Sequence[Array] = ()) -> bool:
        """Send as `Messenger.send`; arrays go directly if there is a link."""
        pair = self._pairs.get(to) if arrays else None
        if pair is None or not self._carries(to, pair, arrays):
            return self._messenger.send(to, message, tuple([self._direct.hosted(array) for array in arrays]))
        pair.sent += 1
        sent = self._messenger.send(
            to, message, arrays, pair.sent
        )  # first, so that it travels while the arrays are queued
        if sent:
            self._direct.send(to, pair.sent, arrays)
        self._send_notices()
        return sent

    def _carries(self, to: str, pair: _Pair, arrays: Sequence[Array]) -> bool:
        """Return whether these arrays can go directly now; start a link if there is none yet."""
        nbytes = nbytes_of(arrays)
        if not self._linkable(pair) or not 0 < nbytes <= MAX_FRAME_BYTES:
            return False
        self._direct.offer(to)
        self._send_notices()
        return self._direct.carries(to, nbytes)

    def _linkable(self, pair: _Pair) -> bool:
        return bool(pair.process_group) and pair.process_group == self.process_group

    def _send_notices(self) -> None:
        for said in self._direct.drain_notices():
            self._messenger.send(said.peer, _message_of(said))

    # -- digests -------------------------------------------------------------------------------------------------------

    def sealed(self, to: str, pieces: Sequence[tuple[Array, int, int]] | Array) -> tuple[Array, str]:
        array = pieces if isinstance(pieces, Array) else self._direct.joined(pieces)
        pair = self._pairs.get(to)
        if pair is not None and self._carries(to, pair, (array,)):
            return array, self._direct.digest(array)
        return super().sealed(to, self._direct.hosted(array))

    def verified(self, array: Array, digest: str) -> bool:
        if digest.startswith(CHECKSUM):
            return digest == self._direct.digest(array)
        return super().verified(self._direct.hosted(array), digest)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, timeout: float) -> list[Envelope | PeerCut]:
        """Receive as `Messenger.receive`."""
        self._arrive()
        self._send_notices()
        for item in self._messenger.receive(0.0 if self._through else timeout):
            if isinstance(item, PeerCut):
                self._let_go(item.peer)
                self._through.append(item)
            else:
                self._handle_envelope(item)
        self._arrive()
        self._send_notices()
        out, self._through = self._through, []
        return out

    def _handle_envelope(self, envelope: Envelope) -> None:
        """Deliver a message, or hold it until its arrays have arrived."""
        if envelope.sender == SCHEDULER:
            if envelope.ticket is None:  # the scheduler sends no arrays
                self._through.append(envelope)
            return
        pair, message = self._pair(envelope), envelope.message
        match message:
            case RendezvousKey():
                self._handle_rendezvous(envelope.sender, pair, message)
                return
            case LinkClosed():
                self._direct.handle_close(envelope.sender, not message.outgoing, message.reason)
                return
        if envelope.ticket is not None and not self._expect(envelope, envelope.ticket, pair):
            return
        if envelope.ticket is not None or pair.held:
            pair.held.append(envelope)
        else:
            self._through.append(envelope)

    def _pair(self, envelope: Envelope) -> _Pair:
        """Return the state of the sender's incarnation, which may send before it is learnt."""
        pair = self._pairs.get(envelope.sender)
        if pair is None or pair.incarnation != envelope.incarnation:
            self._let_go(envelope.sender)
            pair = self._pairs[envelope.sender] = _Pair(envelope.incarnation)
        return pair

    def _handle_rendezvous(self, peer: str, pair: _Pair, message: RendezvousKey) -> None:
        if pair.process_group is None:
            if len(pair.early) < _EARLY:
                pair.early.append(message)
        elif self._linkable(pair):
            self._direct.handle_rendezvous(peer, not message.outgoing, message.key, message.value)
        else:
            self._messenger.send(peer, LinkClosed(not message.outgoing, "there can be no link"))

    def _expect(self, envelope: Envelope, ticket: int, pair: _Pair) -> bool:
        """Register the arrays that a message announces; cut its sender and return False if it may not announce them."""
        nbytes = nbytes_of(envelope.arrays)
        if not self._direct.expects(envelope.sender):
            why = "it announces arrays, and has no link to send them over"
        elif ticket <= pair.heard:
            why = "it announces arrays under a ticket that was used"
        elif pair.missing + nbytes > _MOST_ANNOUNCED:
            why = "it announces more than can come"
        else:
            pair.heard = ticket
            pair.missing += nbytes
            self._direct.expect(envelope.sender, ticket, envelope.arrays)
            return True
        self.deny(envelope.sender, why)
        self._through.append(PeerCut(envelope.sender, envelope.incarnation, why))
        return False

    def _arrive(self) -> None:
        """Process arrivals and failures, and deliver the messages that waited for them."""
        for came in self._direct.drain_arrivals():
            pair = self._pairs.get(came.peer)
            if pair is None:
                continue
            at = next((at for at, envelope in enumerate(pair.held) if envelope.ticket == came.ticket), None)
            if at is None:
                continue
            complete = self._complete(pair.held[at], pair, came)
            if complete is None:
                del pair.held[at]
            else:
                pair.held[at] = complete
            while pair.held and pair.held[0].ticket is None:
                self._through.append(pair.held.popleft())

    def _complete(self, envelope: Envelope, pair: _Pair, came: ArrivedTensor) -> Envelope | None:
        """Return a message with its arrays, or PageData with an error; None if the message is dropped.

        The scheduler receives RowsLost for dropped rows.
        """
        pair.missing -= nbytes_of(envelope.arrays)
        if not came.error:
            return Envelope(envelope.sender, envelope.incarnation, envelope.message, came.arrays)
        message, why = envelope.message, f"its tensors did not come directly: {came.error}"
        if isinstance(message, PageData):
            return Envelope(envelope.sender, envelope.incarnation, replace(message, digest="", error=why))
        if isinstance(message, ForwardRows):
            self._messenger.send(SCHEDULER, RowsLost(self._device, message.seqs, message.epochs, why, True))
        if isinstance(message, MendPages):
            self._messenger.send(SCHEDULER, MigrationFailed(self._device, message.move, message.seq, why))
        return None

    def _let_go(self, name: str) -> None:
        if self._pairs.pop(name, None) is not None:
            self._direct.remove_peer(name)


def _message_of(said: PeerNotice) -> Message:
    return RendezvousKey(said.outgoing, said.key, said.value) if said.key else LinkClosed(said.outgoing, said.reason)
