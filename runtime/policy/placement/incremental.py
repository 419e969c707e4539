"""Place the blocks of a chain that is added to a running cluster, into the free room (BL-30).

Each block first gets one device: the first of its wished devices with room, else the device of the block before it,
else the device with the most room. Further wishes are fulfilled with the room that is left.

If that fails, the largest blocks are placed first, each where the most room is. If that fails too, the result is None,
although a better packing might exist. Existing blocks do not move. Pure functions; sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """Describe a block that is on no device yet. `wished`: preferred devices, best first."""

    block: str
    nbytes: int
    wished: tuple[str, ...] = ()


#: Free bytes by device; None for no limit.
Room = Mapping[str, int | None]


def renew(needs: Sequence[Need], room: Room) -> tuple[tuple[str, str], ...] | None:
    """Return (block, device) for each need, and again for each further wish that fits; None if a need finds no room."""
    first = _wished(needs, _Free(room)) or _packed(needs, _Free(room))
    if first is None:
        return None
    left = _Free(room)
    for need in needs:
        left.use_bytes(first[need.block], need.nbytes)
    pairs = list(first.items())
    for need in needs:
        for device in need.wished:
            if device != first[need.block] and left.fits(device, need.nbytes):
                left.use_bytes(device, need.nbytes)
                pairs.append((need.block, device))
    return tuple(pairs)


class _Free:
    def __init__(self, room: Room) -> None:
        self._left = dict(room)

    def fits(self, device: str, nbytes: int) -> bool:
        if device not in self._left:
            return False
        left = self._left[device]
        return left is None or nbytes <= left

    def use_bytes(self, device: str, nbytes: int) -> None:
        left = self._left[device]
        if left is not None:
            self._left[device] = left - nbytes

    def most(self) -> str:
        return max(self._left, key=lambda device: float("inf") if (left := self._left[device]) is None else left)

    def __len__(self) -> int:
        return len(self._left)


def _wished(needs: Sequence[Need], free: _Free) -> dict[str, str] | None:
    """Place blocks in the order given, by their wishes."""
    found: dict[str, str] = {}
    before = ""
    for need in needs:
        options = [*need.wished, before, *([free.most()] if len(free) else [])]
        device = next((each for each in options if free.fits(each, need.nbytes)), None)
        if device is None:
            return None
        free.use_bytes(device, need.nbytes)
        found[need.block] = before = device
    return found


def _packed(needs: Sequence[Need], free: _Free) -> dict[str, str] | None:
    """Place blocks largest first, by free room only."""
    found: dict[str, str] = {}
    for need in sorted(needs, key=lambda each: -each.nbytes):
        if not len(free) or not free.fits(device := free.most(), need.nbytes):
            return None
        free.use_bytes(device, need.nbytes)
        found[need.block] = device
    return {need.block: found[need.block] for need in needs}
