"""Where blocks are put at first: in chain order over devices, so that each chain changes device as seldom as it can.

    spread(sizes, limits)     blocks in order, cut into runs, one for each device: the largest run is as small as can be
    cells(total, limits)      devices in groups that each hold everything, as many groups as there can be

Pure; sizes in bytes. What happens later (scaling, locality) is others' affair (`scaling`, `placement`).
"""

from __future__ import annotations

from collections.abc import Sequence


def spread(sizes: Sequence[int], limits: Sequence[int]) -> tuple[int, ...] | None:
    """Which device takes each block: device numbers that never fall along the blocks. None where no such cut fits the
    limits.

    Args:
        sizes: bytes of the blocks, in chain order.
        limits: bytes that each device takes, 0 for any number.

    The cut minimises the largest load; of equal ones the first, with its earlier devices full.
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
    """Devices in groups of one size, neighbours together, each of which holds all blocks; the smallest size that does.
    Empty if none does.

    `split`: one group of all devices, even where fewer would do. Devices that are left over stand in no group.
    """
    count = len(limits)
    for size in range(count if split else 1, count + 1):
        groups = [tuple(range(first, first + size)) for first in range(0, count - size + 1, size)]
        if groups and all(spread(sizes, [limits[at] for at in group]) is not None for group in groups):
            return tuple(groups)
    return ()
