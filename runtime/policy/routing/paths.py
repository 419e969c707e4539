"""Choose the devices of a new sequence: a search for the cheapest path over a cost table (BL-13, BL-15).

Each block gets a device:

    cost of a path = cost of entering its first device  +  sum over blocks of the cost of running each on its device
                     +  for each change of device: `hop`, and the cost of entering the next device

The tables differ in what they count; the search is the same:

    by_load       sequences on a device
    by_latency    seconds of queue, compute and load, from profiles, if all blocks were measured (BL-21)
    by_bytes      bytes that steps read for it (`policy.routing.bytes_read`), for memory-bound devices

Pure functions. The location of existing K and V is not considered here; `variants.dispatch` weighs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from runtime.policy.routing.latency import Latency

#: Steps of the search for a path that holds a long sequence, per length tried.
_TRIES = 512


@dataclass(frozen=True, slots=True)
class PathCosts:
    """Hold the cost table of a path search.

    Fields:
        blocks: For each block, the cost of running it on each candidate device.
        hop: Cost of each change of device.
        across: Cost of a change of device to another server, on top of that.
        servers: The server of each device; empty where `across` is 0.
        enters: By device, additional cost of entering it; empty for none.
    """

    blocks: Sequence[Mapping[str, float]]
    hop: float
    enters: Mapping[str, float] = field(default_factory=dict)
    across: float = 0.0
    servers: Mapping[str, str] = field(default_factory=dict)


def by_load(candidates: Sequence[Sequence[str]], loads: Mapping[str, float], hop: float) -> PathCosts:
    """Build a table in which a device costs its number of sequences, times the part of the chain that runs there."""
    share = 1.0 / max(len(candidates), 1)
    return PathCosts([{device: loads[device] * share for device in some} for some in candidates], hop)


def by_latency(
    table: Sequence[Mapping[str, Latency]], hop: float, across: float = 0.0, servers: Mapping[str, str] | None = None
) -> PathCosts:
    """Build a table in which a block costs the sum of its latency terms, in seconds; hops are in seconds, too."""
    blocks = [{device: each.total for device, each in row.items()} for row in table]
    return PathCosts(blocks, hop, across=across, servers=servers or {})


def by_bytes(adds: Sequence[Mapping[str, float]], enters: Mapping[str, float], hop: float) -> PathCosts:
    """Build a table in which a block costs the bytes that it adds to all steps of a device.

    `enters`: the bytes that a step of the device reads already; a sequence that enters waits for that whole step.
    """
    return PathCosts(adds, hop, enters)


def cheapest(costs: PathCosts) -> tuple[str, ...] | None:
    """Return the device of each block on the cheapest path, or None if a block has no candidate.

    Among equal paths the one with the earlier candidates wins.
    """
    if not costs.blocks or not all(costs.blocks):
        return None
    enters = costs.enters
    total = {device: enters[device] + cost if enters else cost for device, cost in costs.blocks[0].items()}
    came: list[dict[str, str]] = []
    for row in costs.blocks[1:]:
        least = anywhere = min(total, key=total.__getitem__)
        near = _least_by_server(total, costs)
        after: dict[str, float] = {}
        before: dict[str, str] = {}
        for device, cost in row.items():
            changes = total[anywhere] + costs.hop
            least = anywhere
            if near:
                changes += costs.across
                beside = near.get(costs.servers[device])
                if beside is not None and total[beside] + costs.hop <= changes:
                    changes, least = total[beside] + costs.hop, beside
            changes += enters[device] if enters else 0.0
            stays = total.get(device)
            if stays is not None and stays <= changes:
                after[device], before[device] = stays + cost, device
            else:
                after[device], before[device] = changes + cost, least
        total = after
        came.append(before)
    path = [min(total, key=total.__getitem__)]
    for before in reversed(came):
        path.append(before[path[-1]])
    return tuple(reversed(path))


def _least_by_server(total: Mapping[str, float], costs: PathCosts) -> dict[str, str]:
    """Return the device with the least cost so far on each server; nothing where servers do not matter."""
    near: dict[str, str] = {}
    if costs.across and costs.servers:
        for device, so_far in total.items():
            known = near.get(costs.servers[device])
            if known is None or so_far < total[known]:
                near[costs.servers[device]] = device
    return near


def path_cost(devices: Sequence[str], loads: Mapping[str, float], hop_cost: float) -> float:
    """Return the cost by load of a path, given as the device of each block."""
    hops = sum(one != other for one, other in pairwise(devices))
    return sum(loads[device] for device in devices) / max(len(devices), 1) + hop_cost * hops


def choose_roomy(
    candidates: Sequence[Sequence[str]], pages: Sequence[int], capacity: Mapping[str, int], groups: int
) -> tuple[str, ...] | None:
    """Return the device of each block on a path that holds a sequence of `groups` page sets, as far as possible.

    Used when the cheapest path does not hold it. `pages`: pages per page set of each block. A device is filled before
    the next one, that with the most room, is used (first fit); a block with no room anywhere goes where the least is
    missing.

    If that path does not hold the sequence, a limited search tries other paths, and the one that holds the most of it
    wins. None if a block has no candidate.
    """
    if not candidates or not all(candidates):
        return None
    room = {device: capacity[device] for some in candidates for device in some}
    path: list[str] = []
    for some, more in zip(candidates, pages, strict=True):
        stays = bool(path) and path[-1] in some and room[path[-1]] >= more * groups
        path.append(path[-1] if stays else max(some, key=room.__getitem__))
        room[path[-1]] -= more * groups
    if min(room.values()) >= 0:
        return tuple(path)
    best, least, most = tuple(path), _groups_on(path, pages, capacity), groups
    while least < most:
        middle = (least + most + 1) // 2
        other = _fitting(candidates, pages, capacity, middle)
        if other is None:
            most = middle - 1
        else:
            best, least = other, middle
    return best


def _groups_on(path: Sequence[str], pages: Sequence[int], capacity: Mapping[str, int]) -> int:
    """Return the number of page sets that one sequence can have along a path."""
    taken: Counter[str] = Counter()
    for device, more in zip(path, pages, strict=True):
        taken[device] += more
    return min((capacity[device] // more for device, more in taken.items() if more), default=0)


def _fitting(
    candidates: Sequence[Sequence[str]], pages: Sequence[int], capacity: Mapping[str, int], groups: int
) -> tuple[str, ...] | None:
    """Find a path that holds `groups` page sets, within `_TRIES` steps: depth first, block by block.

    Pages of blocks with only one candidate device are subtracted first.
    """
    room = {device: capacity[device] // groups for some in candidates for device in some}
    for some, more in zip(candidates, pages, strict=True):
        room[some[0]] -= more if len(some) == 1 else 0
    free = sum(more for some, more in zip(candidates, pages, strict=True) if len(some) > 1)
    if min(room.values()) < 0 or sum(room.values()) < free:
        return None
    path: list[str] = []
    untried: list[list[str]] = [_by_room(candidates[0], pages[0], room, "")]
    for _ in range(_TRIES):
        at = len(path)
        if untried[-1]:
            path.append(untried[-1].pop())
            room[path[-1]] -= pages[at] if len(candidates[at]) > 1 else 0
            if len(path) == len(candidates):
                return tuple(path)
            untried.append(_by_room(candidates[at + 1], pages[at + 1], room, path[-1]))
        elif path:
            untried.pop()
            device = path.pop()
            room[device] += pages[at - 1] if len(candidates[at - 1]) > 1 else 0
        else:
            return None
    return None


def _by_room(some: Sequence[str], more: int, room: Mapping[str, int], last: str) -> list[str]:
    """Return the devices with room for a block, the first to try last in the list.

    The device of the previous block is tried first, then those with the most room. A block without pages gets one
    device, because another try could not change anything.
    """
    if len(some) == 1:
        return list(some)
    fitting = (device for device in some if room[device] >= more)
    able = sorted(fitting, key=lambda device: (device == last, room[device]))
    return able if more else able[-1:]
