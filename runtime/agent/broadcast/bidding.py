"""Offer a hop to several devices and give it to the first one that bids (BL-23, dispatch by the agents).

    scheduler --OpenSequences: path, and candidate devices per hop--> every device that may run a part of it
    offerer --Offer--> candidates      a row has run its hop, and the next hop has several candidates
    candidate --Bid--> offerer         at once if no step runs, else after the step if the next one has room
    offerer --ForwardRows--> first bidder, --Retract--> other candidates, --HopAssigned--> scheduler

Later bids are refused. The choice is made once per sequence and hop, with the first row that reaches the hop: no device
has K and V for it yet. From then on the winner owns them, and later rows go there at once (BL-19).

The offerer's `policy.routing.bids.Bids` is the only authority: it gives a row to one device, once, and the row is held
until then. A row without candidates left is reported as lost. A candidate reserves nothing for an offer or a bid: the
scheduler has already accounted for the pages on all candidates. Offers of sequences that are closed or opened again are
dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from runtime.agent.sequences.sequence import AgentSequence, QueuedRow
from runtime.agent.steps.outbound import lost_of, pass_of
from runtime.chains import Array
from runtime.control.agent_io import Send
from runtime.messages import SCHEDULER, Bid, HopAssigned, Offer, Retract
from runtime.policy.routing.bids import Accepted, Bids


@dataclass(frozen=True, slots=True)
class _Asked:
    """An offer received by this device, of `tokens` tokens of a sequence."""

    by: str
    seq: str
    epoch: int
    hop: int
    tokens: int


class HopBidding:
    """The offers that one device has made and received."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._book = Bids()
        self._held: dict[str, tuple[QueuedRow, Array]] = {}
        self._new: dict[str, list[QueuedRow]] = {}
        self._lost: list[QueuedRow] = []
        self._asked: list[_Asked] = []
        #: Whether any hop was ever offered, by this device or to it. While False there is nothing to do here.
        self.used = False

    def __bool__(self) -> bool:
        """Return whether any offer is open, made or received here."""
        return bool(self._held) or bool(self._asked)

    @property
    def waits(self) -> bool:
        """Whether there are messages to send or offers to bid for."""
        return bool(self._new) or bool(self._lost) or bool(self._asked)

    # -- offerer -------------------------------------------------------------------------------------------------------

    def offers(self, row: QueuedRow, output: Array) -> bool:
        """Offer the next hop of a row that has run here; return False if its device is already fixed.

        `output` is kept until a device takes the row. Without any candidate left the row is reported as lost.
        """
        devices = row.sequence.offers.get(row.hop + 1)
        if devices is None:
            return False
        self.used = True
        if not devices:
            self._lost.append(row)
            return True
        name = _name(row.sequence.seq, row.epoch, row.hop + 1)
        self._book.offer(name, devices)
        self._held[name] = row, output
        for device in devices:
            self._new.setdefault(device, []).append(row)
        return True

    def drain_messages(self) -> list[Send]:
        """Return the messages since the last call: one Offer per candidate, and a RowsLost without candidates."""
        out = [Send(device, _offer_of(self._device, rows)) for device, rows in self._new.items()]
        if self._lost:
            out.append(
                Send(
                    SCHEDULER,
                    lost_of(self._device, self._lost, "nobody is left who could take its next hop", retry=True),
                )
            )
        self._new, self._lost = {}, []
        return out

    def bid(self, bid: Bid) -> list[Send]:
        """Handle a bid: forward the rows that are still open to the bidder.

        Other candidates receive a Retract, and the scheduler a HopAssigned.
        """
        rows: list[QueuedRow] = []
        arrays: list[Array] = []
        others: dict[str, list[QueuedRow]] = {}
        for seq, epoch, hop in zip(bid.seqs, bid.epochs, bid.hops, strict=True):
            name = _name(seq, epoch, hop)
            answer = self._book.accept(name, bid.device)
            if not isinstance(answer, Accepted):
                continue
            self._book.close(name)
            row, output = self._held.pop(name)
            _settle(row.sequence, hop, answer.device)
            rows.append(row)
            arrays.append(output)
            for device in answer.cancel:
                others.setdefault(device, []).append(row)
        if not rows:
            return []
        taken = Send(bid.device, pass_of(rows), tuple(arrays))
        return [
            taken,
            *(Send(device, _retract_of(some)) for device, some in others.items()),
            Send(SCHEDULER, self._won(rows, bid.device)),
        ]

    def remove_device(self, device: str, sequences: Iterable[AgentSequence]) -> list[Send]:
        """Remove a device that is gone, as a candidate and as an offerer."""
        self._asked = [each for each in self._asked if each.by != device]
        for sequence in sequences:
            for hop, devices in sequence.offers.items():
                if device in devices:
                    sequence.offers[hop] = tuple(each for each in devices if each != device)
        self._lost += [self._held.pop(name)[0] for name in self._book.remove_device(device)]
        return self.drain_messages()

    # -- candidate -----------------------------------------------------------------------------------------------------

    def add_offer(self, offer: Offer) -> None:
        self.used = True
        columns = zip(offer.seqs, offer.epochs, offer.hops, offer.counts, strict=True)
        self._asked += [_Asked(offer.device, seq, epoch, hop, count) for seq, epoch, hop, count in columns]

    def retracted(self, order: Retract) -> None:
        """Drop offers that another device has taken."""
        gone = set(zip(order.seqs, order.epochs, order.hops, strict=True))
        self._asked = [each for each in self._asked if (each.seq, each.epoch, each.hop) not in gone]

    def bids(self, room: int | None) -> list[Send]:
        """Bid for received offers in order, while they fit into `room` tokens of the next step (None: no limit)."""
        taken: dict[str, list[_Asked]] = {}
        count = 0
        for each in self._asked:
            if room is not None and each.tokens > room:
                break
            room = None if room is None else room - each.tokens
            taken.setdefault(each.by, []).append(each)
            count += 1
        del self._asked[:count]
        return [Send(by, _bid_of(self._device, some)) for by, some in taken.items()]

    # -- both ----------------------------------------------------------------------------------------------------------

    def closed(self, seq: str, epoch: int) -> None:
        """Drop the offers of a sequence up to this epoch."""
        if not self:
            return
        self._asked = [each for each in self._asked if each.seq != seq or each.epoch > epoch]
        for name in [name for name, (row, _) in self._held.items() if row.sequence.seq == seq and row.epoch <= epoch]:
            del self._held[name]
            self._book.close(name)

    def check(self) -> None:
        """Verify that exactly the rows held are offered, by open sequences. Raises RuntimeError. For tests."""
        if len(self._book) != len(self._held) or not all(row.sequence.here for row, _ in self._held.values()):
            raise RuntimeError("a hop is offered that nobody has, or is held that nobody is offered")

    def _won(self, rows: list[QueuedRow], winner: str) -> HopAssigned:
        columns = zip(
            *((each.sequence.seq, each.epoch, each.hop + 1, each.start, each.tokens) for each in rows), strict=True
        )
        seqs, epochs, hops, starts, counts = columns
        return HopAssigned(self._device, seqs, epochs, hops, starts, counts, (winner,) * len(rows))


def _name(seq: str, epoch: int, hop: int) -> str:
    return f"{epoch}/{hop}/{seq}"


def _settle(sequence: AgentSequence, hop: int, device: str) -> None:
    """Fix the device of a hop in the sequence's path."""
    del sequence.offers[hop]
    sequence.path = (*sequence.path[:hop], replace(sequence.path[hop], device=device), *sequence.path[hop + 1 :])


def _offer_of(device: str, rows: list[QueuedRow]) -> Offer:
    seqs, epochs, hops, counts = zip(
        *((each.sequence.seq, each.epoch, each.hop + 1, each.tokens) for each in rows), strict=True
    )
    return Offer(device, seqs, epochs, hops, counts)


def _retract_of(rows: list[QueuedRow]) -> Retract:
    seqs, epochs, hops = zip(*((each.sequence.seq, each.epoch, each.hop + 1) for each in rows), strict=True)
    return Retract(seqs, epochs, hops)


def _bid_of(device: str, some: list[_Asked]) -> Bid:
    seqs, epochs, hops = zip(*((each.seq, each.epoch, each.hop) for each in some), strict=True)
    return Bid(device, seqs, epochs, hops)
