"""Place blocks initially on many devices: each chain whole on one device, few distinct weights per device.

    pack(chains, sizes, limits)     for each chain the device of each of its blocks, or None if it does not fit
    fill(..., free)                 copies for devices that are left over, before there is demand

The largest chains come first, each onto the device with the smallest load after it: blocks that the device has already
cost nothing, and of equals the one that needs the fewest additional bytes wins. So a device reads few weights per step,
and devices that are left over wait for demand.

If a chain finds no place that way, all are placed again by the fewest additional bytes. A chain larger than the room of
any device is cut into as few runs as `spread` finds room for; blocks that are placed already stay.

Pure functions; sizes in bytes, limits with 0 for no limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.policy.placement.partition import spread

#: Room of a device without a limit, in bytes.
_ANY = 1 << 62
#: Most devices that a chain is cut over.
_PIECES = 16

#: For each chain the device number of each block, or None if it found no place.
Packed = tuple[tuple[int, ...] | None, ...]


def pack(chains: Sequence[Sequence[str]], sizes: Mapping[str, int], limits: Sequence[int]) -> Packed:
    """Place chains, each a sequence of blocks. A chain without a place does not affect the other chains."""
    wide = _packed(chains, sizes, limits, sharing=False)
    if None not in wide:
        return wide
    tight = _packed(chains, sizes, limits, sharing=True)
    return tight if tight.count(None) < wide.count(None) else wide


def _packed(chains: Sequence[Sequence[str]], sizes: Mapping[str, int], limits: Sequence[int], sharing: bool) -> Packed:
    held: list[set[str]] = [set() for _ in limits]
    loads = [0] * len(limits)
    found: list[tuple[int, ...] | None] = [None] * len(chains)
    order = sorted(range(len(chains)), key=lambda at: (-sum(sizes[block] for block in set(chains[at])), at))
    for at in order:
        chain = chains[at]
        plan = _whole(chain, sizes, limits, held, loads, sharing) or _cut(chain, sizes, limits, held, loads)
        found[at] = plan
        for block, device in zip(chain, plan or (), strict=False):
            if block not in held[device]:
                held[device].add(block)
                loads[device] += sizes[block]
    return tuple(found)


def _whole(
    chain: Sequence[str],
    sizes: Mapping[str, int],
    limits: Sequence[int],
    held: Sequence[set[str]],
    loads: Sequence[int],
    sharing: bool,
) -> tuple[int, ...] | None:
    """Place a chain on one device, or return None."""
    blocks = dict.fromkeys(chain)
    total = sum(sizes[block] for block in blocks)
    best: tuple[int, int, int] | None = None
    for device, limit in enumerate(limits):
        there = held[device]
        more = total if not there else sum(sizes[block] for block in blocks if block not in there)
        load = loads[device] + more
        if limit and load > limit:
            continue
        key = (more, load, device) if sharing else (load, more, device)
        if best is None or key < best:
            best = key
    return None if best is None else (best[2],) * len(chain)


def _cut(
    chain: Sequence[str],
    sizes: Mapping[str, int],
    limits: Sequence[int],
    held: Sequence[set[str]],
    loads: Sequence[int],
) -> tuple[int, ...] | None:
    """Place a chain in runs over the devices with the most room; blocks that are placed already stay."""
    where: dict[str, int] = {}
    for device, there in enumerate(held):
        for block in there:
            where.setdefault(block, device)
    absent = [block for block in dict.fromkeys(chain) if block not in where]
    room = [(limit - load if limit else _ANY) for limit, load in zip(limits, loads, strict=True)]
    roomy = sorted((at for at in range(len(limits)) if room[at] > 0), key=lambda at: (-room[at], at))[:_PIECES]
    for count in range(1, len(roomy) + 1):
        plan = spread([sizes[block] for block in absent], [room[at] for at in roomy[:count]])
        if plan is not None:
            where.update((block, roomy[at]) for block, at in zip(absent, plan, strict=True))
            return tuple(where[block] for block in chain)
    return None


def fill(
    chains: Sequence[Sequence[str]],
    packed: Packed,
    sizes: Mapping[str, int],
    limits: Sequence[int],
    free: Sequence[int],
) -> list[tuple[int, tuple[str, ...]]]:
    """Return devices that hold nothing, each with the blocks it gets: all blocks of another device.

    The device with the most work per copy gets the next copy. All chains are assumed to have equal demand and to take
    time in proportion to their bytes.
    """
    held: dict[int, dict[str, None]] = {}
    work: dict[int, int] = {}
    for chain, plan in zip(chains, packed, strict=True):
        for block, at in zip(chain, plan or (), strict=False):
            held.setdefault(at, {})[block] = None
            work[at] = work.get(at, 0) + sizes[block]
    copies = dict.fromkeys(held, 1)
    made: list[tuple[int, tuple[str, ...]]] = []
    for device in free:
        need = {at: sum(sizes[block] for block in blocks) for at, blocks in held.items()}
        fits = [at for at in held if not limits[device] or need[at] <= limits[device]]
        if not fits:
            continue
        most = max(fits, key=lambda at: (work[at] / copies[at], -at))
        copies[most] += 1
        made.append((device, tuple(held[most])))
    return made
