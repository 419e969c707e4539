"""A hop that is offered to several instances at once is run by one of them (BL-23).

    offer -> accepted by the first that says so; the others are told to forget it; whoever comes later is refused

The paper has agents broadcast and does not say what if two accept. One book, kept by whoever offers, decides: it is
asked in some order, and that order is the answer. It knows no devices beyond their names, no clock and no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accepted:
    """This device runs it; `cancel`: devices to be told that they do not."""

    device: str
    cancel: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BidRefused:
    """This device does not run it. `exhausted`: nobody is left who could, so that it must be offered anew."""

    reason: str
    exhausted: bool = False


@dataclass(slots=True)
class _Offer:
    asked: list[str]  # who has not answered
    winner: str | None = None


class Bids:
    """Open offers by name. A name is used once until it is closed."""

    def __init__(self) -> None:
        self._offers: dict[str, _Offer] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def offer(self, hop: str, devices: Sequence[str]) -> None:
        """Offer a hop. Raises ValueError for one that is offered already, or for no devices."""
        if hop in self._offers or not devices:
            raise ValueError(f"hop {hop} cannot be offered to {len(devices)} devices")
        self._offers[hop] = _Offer(list(dict.fromkeys(devices)))

    def accept(self, hop: str, device: str) -> Accepted | BidRefused:
        """A device would run it. A second time from the winner is refused too: it runs already."""
        offer = self._offers.get(hop)
        if offer is None:
            return BidRefused("there is no such offer")
        if offer.winner is not None:
            return BidRefused(f"{offer.winner} has it")
        if device not in offer.asked:
            return BidRefused("it was not asked")
        offer.winner = device
        return Accepted(device, tuple(each for each in offer.asked if each != device))

    def decline(self, hop: str, device: str) -> BidRefused:
        """A device cannot run it, or is gone. If it had it, or was the last one asked, the hop is `exhausted` and its
        offer closed.
        """
        offer = self._offers.get(hop)
        if offer is None or device not in offer.asked:
            return BidRefused("there is no such offer")
        offer.asked.remove(device)
        exhausted = offer.winner == device or not offer.asked
        if exhausted:
            del self._offers[hop]
        return BidRefused("it declined", exhausted)

    def remove_device(self, device: str) -> tuple[str, ...]:
        """A device is gone: hops that must be offered anew, because it had them or was the last one asked."""
        asked = [hop for hop, offer in self._offers.items() if device in offer.asked]
        return tuple(hop for hop in asked if self.decline(hop, device).exhausted)

    def close(self, hop: str) -> None:
        """The hop has run, or nobody wants it any more. Unknown ones are nothing to do."""
        self._offers.pop(hop, None)
