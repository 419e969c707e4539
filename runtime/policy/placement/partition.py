"""Place blocks initially in chain order over devices, so that each chain changes device as rarely as possible.

    spread(sizes, limits)     cut the blocks in order into one run per device, with the largest run as small as possible
    cells(sizes, limits)      divide the devices into groups that each hold everything, as many groups as possible

Pure functions; sizes in bytes. Later changes are made by `policy.scaling` and `policy.placement.locality`.
"""

from __future__ import annotations

from collections.abc import Sequence


def spread(sizes: Sequence[int], limits: Sequence[int]) -> tuple[int, ...] | None:
    """Return the device number of each block, never falling along the blocks; None if no cut fits the limits.

    Args:
        sizes: Bytes of the blocks, in chain order.
        limits: Bytes that each device takes, 0 for no limit.

    The cut minimises the largest load; of equal cuts it is the first, with earlier devices full.
    """
    if not limits:
        return None
    best: list[tuple[int, ...] | None] = [() if at == 0 else None for at in range(len(sizes) + 1)]
    worst: list[int] = [0] * (len(sizes) + 1)
    for device, limit in enumerate(limits):
        plans, loads = list(best), list(worst)
        for end in range(len(sizes) + 1):
            run = 0
            for start in range(end - 1, -1, -1):
                run += sizes[start]
                if limit and run > limit:
                    break
                before = best[start]
                if before is None:
                    continue
                load = max(worst[start], run)
                if plans[end] is None or load < loads[end]:
                    plans[end], loads[end] = (*before, *(device,) * (end - start)), load
        best, worst = plans, loads
    return best[-1]


def cells(sizes: Sequence[int], limits: Sequence[int], split: bool = False) -> tuple[tuple[int, ...], ...]:
    """Divide the devices into groups of neighbours, of the smallest equal size with which each group holds all blocks.

    Returns an empty tuple if no size does. Devices that are left over are in no group. `split`: one group of all
    devices, even if fewer would do.
    """
    count = len(limits)
    for size in range(count if split else 1, count + 1):
        groups = [tuple(range(first, first + size)) for first in range(0, count - size + 1, size)]
        if groups and all(spread(sizes, [limits[at] for at in group]) is not None for group in groups):
            return tuple(groups)
    return ()
