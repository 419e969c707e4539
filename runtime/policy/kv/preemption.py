"""Decide whether K and V of a sequence that gives way are kept in host memory or computed again (QL-11).

    swap  iff  there is room on every device of its path, and  out + back - overlap < recompute

    out, back    time of the copies to host memory and back
    overlap      part of them during which steps run on
    recompute    time to compute prompt and answer so far again, as one prompt

Pure arithmetic; times in seconds, taken from profiles and measurements by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.config import PreemptionMode


@dataclass(frozen=True, slots=True)
class SwapTimes:
    """Estimated times of both ways, in seconds; see the module docstring."""

    out: float
    back: float
    overlap: float
    recompute: float

    @property
    def swap(self) -> float:
        """Time that swapping takes from other work."""
        return max(self.out + self.back - self.overlap, 0.0)


def swaps(mode: PreemptionMode, times: SwapTimes, needed: Mapping[str, int], room: Mapping[str, int]) -> bool:
    """Return whether K and V go to host memory.

    Args:
        mode: The switch.
        times: Estimated times; read in mode `auto` only.
        needed: Bytes to keep, by device of the path.
        room: Free bytes of host memory, by device.
    """
    if mode == "recompute" or any(nbytes > room.get(device, 0) for device, nbytes in needed.items()):
        return False
    return mode == "swap" or times.swap < times.recompute
