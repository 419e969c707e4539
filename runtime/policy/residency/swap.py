"""Divide the bytes that a load brings by the tier that they come from (UN-04, the T_swap of BL-21).

A block that is on the device costs nothing. Of one that is not, host memory may keep a part, which is only put to use
again; the rest is read from disk, sooner where it was read before and the system's page cache may have it. What leaves
for it costs no time of its own: weights on a device are dropped, not written back. Pure functions; sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwapBytes:
    """Bytes of a load, by tier.

    Fields:
        first: Read from disk for the first time.
        again: Read from disk again.
        host: Kept in host memory.
    """

    first: int = 0
    again: int = 0
    host: int = 0

    @property
    def terms(self) -> tuple[float, float, float, float, float]:
        """Return the terms of its cost: 1 if anything is read, bytes first and again; 1 if anything is kept, bytes.

        A load of nothing is one of what is kept: nothing is read for it.
        """
        read = self.first + self.again > 0
        return float(read), float(self.first), float(self.again), float(self.host > 0 or not read), float(self.host)

    def as_brought(self, disk: int, host: int, own: int) -> SwapBytes:
        """Return what the load has brought, as it was reported, with the same notion of what was read before.

        Args:
            disk, host: Bytes of blocks that came from there.
            own: Bytes beside them, such as adapters, which always come from disk.
        """
        again = min(disk, max(self.again + self.host - host, 0))
        return SwapBytes(disk - again + own, again, host)


def swap_bytes(missing: Mapping[str, int], own: int, had: Collection[str], host: Mapping[str, int]) -> SwapBytes:
    """Return the bytes of a load by tier.

    Args:
        missing: Bytes of the blocks that are not on the device, by id.
        own: Bytes beside the blocks, such as adapters: they are always read.
        had: Blocks that the device has had before.
        host: Bytes of blocks that host memory keeps.
    """
    first, again, kept = own, 0, 0
    for block, size in missing.items():
        there = min(host.get(block, 0), size)
        kept += there
        if block in had:
            again += size - there
        else:
            first += size - there
    return SwapBytes(first, again, kept)
