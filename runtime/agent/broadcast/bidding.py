"""Hops that are offered to several devices at once, and taken by the first that says so (BL-23, the agents' style of
dispatch).

    scheduler --Open: path, and who else may take which hop of it--> everybody who may come to run a part of it
    offerer --Offer--> candidates        a row is through its hop, and for the next one there is a choice
    candidate --Bid--> offerer           at once where no step runs, else when one is over and the next has room
    offerer --Pass--> the first one, --Retract--> the others, --HopAssigned--> scheduler; whoever bids later is refused

A choice is made once per sequence and hop, with the first row that comes there: nobody has K and V of it for that hop
yet. From then on the winner owns them, and every later row goes there at once (BL-19).

Contract: the offerer's book (`policy.routing.bids`) is the one authority: it gives a row to one device, once, and keeps
it until then. What it offers and nobody is left for is lost, and told. A candidate holds nothing for an offer, not even
for one it has bid for. Offers of what has been closed or opened anew are gone. It knows no tensors and no pages: those
the scheduler has taken on all candidates.
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
    """An offer that came here: `tokens` of a sequence."""

    by: str
    seq: str
    epoch: int
    hop: int
    tokens: int


class HopBidding:
    def __init__(self, device: str) -> None:
        self._device = device
        self._book = Bids()
        self._held: dict[str, tuple[QueuedRow, Array]] = {}
        self._new: dict[str, list[QueuedRow]] = {}
        self._lost: list[QueuedRow] = []
        self._asked: list[_Asked] = []

    def __bool__(self) -> bool:
        """Whether anything is offered, here or to others."""
        return bool(self._held) or bool(self._asked)

    @property
    def waits(self) -> bool:
        """Whether something is to be told, or to be bid for."""
        return bool(self._new) or bool(self._lost) or bool(self._asked)

    # -- who offers ----------------------------------------------------------------------------------------------------

    def offers(self, row: QueuedRow, output: Array) -> bool:
        """Offer the next hop of a row that is through here, if there is a choice. `output` is kept until somebody takes
        it.
        """
        devices = row.sequence.offers.get(row.hop + 1)
        if devices is None:
            return False
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
        """What is to be said since the last time: one Offer for each candidate, and what nobody is left for."""
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
        """A candidate would take these: the first one gets them."""
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
        """A device is gone: it takes nothing any more, and has nothing to offer."""
        self._asked = [each for each in self._asked if each.by != device]
        for sequence in sequences:
            for hop, devices in sequence.offers.items():
                if device in devices:
                    sequence.offers[hop] = tuple(each for each in devices if each != device)
        self._lost += [self._held.pop(name)[0] for name in self._book.remove_device(device)]
        return self.drain_messages()

    # -- who is asked --------------------------------------------------------------------------------------------------

    def add_offer(self, offer: Offer) -> None:
        columns = zip(offer.seqs, offer.epochs, offer.hops, offer.counts, strict=True)
        self._asked += [_Asked(offer.device, seq, epoch, hop, count) for seq, epoch, hop, count in columns]

    def retracted(self, order: Retract) -> None:
        """Others have these."""
        gone = set(zip(order.seqs, order.epochs, order.hops, strict=True))
        self._asked = [each for each in self._asked if (each.seq, each.epoch, each.hop) not in gone]

    def bids(self, room: int | None) -> list[Send]:
        """Bid for what was offered here, first come first, while it fits into `room` tokens of the next step; None: for
        all of it.
        """
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
        """A sequence has left, up to this epoch."""
        if not self:
            return
        self._asked = [each for each in self._asked if each.seq != seq or each.epoch > epoch]
        for name in [name for name, (row, _) in self._held.items() if row.sequence.seq == seq and row.epoch <= epoch]:
            del self._held[name]
            self._book.close(name)

    def check(self) -> None:
        """Verify that what is held is offered, by a sequence that is here. Raises RuntimeError. For tests."""
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
    """From now on rows go there."""
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
