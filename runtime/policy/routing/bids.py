"""Decide which of several instances runs a hop that is offered to all of them (BL-23).

    offer -> won by the first bid; the other devices are notified; later bids are refused

The paper has agents broadcast offers and does not define what happens if two accept. Here the offering agent keeps one
`Bids` book, and the order in which bids reach it decides. No clock and no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accepted:
    """Report that this device runs the hop. `cancel`: devices to notify that they do not."""

    device: str
    cancel: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BidRefused:
    """Report that this device does not run the hop. `exhausted`: no device is left, so the hop must be offered anew."""

    reason: str
    exhausted: bool = False


@dataclass(slots=True)
class _Offer:
    asked: list[str]  # devices that have not declined
    winner: str | None = None


class Bids:
    """Hold the open offers by name. A name can be used again after `close`."""

    def __init__(self) -> None:
        self._offers: dict[str, _Offer] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def offer(self, hop: str, devices: Sequence[str]) -> None:
        """Offer a hop. Raises ValueError if it is already offered, or without devices."""
        if hop in self._offers or not devices:
            raise ValueError(f"hop {hop} cannot be offered to {len(devices)} devices")
        self._offers[hop] = _Offer(list(dict.fromkeys(devices)))

    def accept(self, hop: str, device: str) -> Accepted | BidRefused:
        """Process a bid of a device. A second bid of the winner is refused, because the hop runs already."""
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
        """Process a device's refusal or loss.

        If it was the winner, or the last device that was offered the hop, the hop is `exhausted` and its offer closed.
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
        """Process the loss of a device; return the hops that must be offered anew."""
        asked = [hop for hop, offer in self._offers.items() if device in offer.asked]
        return tuple(hop for hop in asked if self.decline(hop, device).exhausted)

    def close(self, hop: str) -> None:
        """Close an offer that has run or is no longer needed. Does nothing for unknown ones."""
        self._offers.pop(hop, None)
