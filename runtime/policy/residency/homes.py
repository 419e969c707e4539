"""Give each chain devices on which it may run, where together they do not fit: every chain has to fit alone.

    homes(chains, sizes, own, limits) -> the device of each block of each chain, or None for a chain that fits nowhere

Devices form cells: the smallest groups of neighbours that each hold every chain that any group of the same size can
hold. A chain lies in one cell, the one with the fewest planned bytes after it is added, so chains with the same base
come together until the cells are evenly full. Pure functions; sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from runtime.policy.placement.partition import spread


def homes(
    chains: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    own: Sequence[int],
    limits: Sequence[int],
    planned: Sequence[Collection[str]] = (),
    tied: Sequence[int] = (),
) -> tuple[tuple[int, ...] | None, ...]:
    """Return the device number of each block of each chain, None for a chain that does not fit alone.

    Args:
        chains: The blocks of each chain, in order.
        sizes: Bytes of the blocks.
        own: Bytes of each chain beside its blocks (adapters), counted with its first block.
        limits: Bytes that each device takes, 0 for no limit.
        planned: Blocks that are planned on each device already.
        tied: Bytes that two blocks of each chain have in common (a tied head): a single device holds them once.
    """
    common = tied or [0] * len(chains)
    size = max((_devices_needed(*each, sizes, limits) for each in zip(chains, own, common, strict=True)), default=1)
    cells = [tuple(range(first, first + size)) for first in range(0, len(limits) - size + 1, size)]
    there: list[set[str]] = [{block for at in cell if at < len(planned) for block in planned[at]} for cell in cells]
    held = [sum(sizes.get(block, 0) for block in some) for some in there]
    made: list[tuple[int, ...] | None] = []
    for chain, beside, shared in zip(chains, own, common, strict=True):
        extra = beside - (shared if size == 1 else 0)
        cuts = [spread(_sizes(chain, sizes, extra), [limits[at] for at in cell]) for cell in cells]
        able = [at for at, cut in enumerate(cuts) if cut is not None]
        if not able:
            made.append(None)
            continue
        more = {at: extra + sum(sizes[block] for block in set(chain) - there[at]) for at in able}
        best = min(able, key=lambda at: (held[at] + more[at], at))
        there[best].update(chain)
        held[best] += more[best]
        made.append(tuple(cells[best][at] for at in cuts[best] or ()))
    return tuple(made)


def _devices_needed(chain: Sequence[str], own: int, tied: int, sizes: Mapping[str, int], limits: Sequence[int]) -> int:
    """Return the size of the smallest group of neighbouring devices that holds a chain alone; 1 if none does."""
    for size in range(1, len(limits) + 1):
        groups = (limits[first : first + size] for first in range(len(limits) - size + 1))
        extra = own - (tied if size == 1 else 0)
        if any(spread(_sizes(chain, sizes, extra), group) is not None for group in groups):
            return size
    return 1


def _sizes(chain: Sequence[str], sizes: Mapping[str, int], own: int) -> list[int]:
    """Return the bytes of a chain's blocks in order, `own` with the first; a block that comes again costs nothing."""
    each = [0 if block in chain[:at] else sizes[block] for at, block in enumerate(chain)]
    return [each[0] + own, *each[1:]] if each else []
