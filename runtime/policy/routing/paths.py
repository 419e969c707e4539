"""Which devices run a new sequence, block by block: one search for the cheapest path, over a table of costs (BL-13,
BL-15).

    cost of a path = what entering its first device costs  +  sum over blocks of what running each there costs
                     +  for each change of device: `hop`, and what entering the next device costs

The tables differ in what they count; the search is the same:

    by_load       sequences on a device
    by_latency    seconds of queue, compute and load, from profiles, where all blocks were measured (BL-21)
    by_bytes      bytes that steps read for it (`policy.routing.bytes_read`), for devices that are bound by memory

Pure. The K and V of a sequence that has run stay where they are; only `dispatch` weighs that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from runtime.policy.routing.latency import Latency

#: Steps of the search for a path that holds a long sequence, for each length that is tried.
_TRIES = 512


@dataclass(frozen=True, slots=True)
class PathCosts:
    """`blocks`: for each block, by candidate, what running it there costs. `hop`: each change of device. `enters`: by
    device, what coming to it costs beside; empty for nothing."""

    blocks: Sequence[Mapping[str, float]]
    hop: float
    enters: Mapping[str, float] = field(default_factory=dict)


def by_load(candidates: Sequence[Sequence[str]], loads: Mapping[str, float], hop: float) -> PathCosts:
    """A device costs its load, in sequences, for the part of the chain that runs there."""
    share = 1.0 / max(len(candidates), 1)
    return PathCosts([{device: loads[device] * share for device in some} for some in candidates], hop)


def by_latency(table: Sequence[Mapping[str, Latency]], hop: float) -> PathCosts:
    """A block costs the seconds that all its terms take; `hop` in seconds, too."""
    return PathCosts([{device: each.total for device, each in row.items()} for row in table], hop)


def by_bytes(adds: Sequence[Mapping[str, float]], enters: Mapping[str, float], hop: float) -> PathCosts:
    """A block costs the bytes that it adds to all steps there; a device, those that a step there reads before: it is
    waited for whole at every change of device."""
    return PathCosts(adds, hop, enters)


def cheapest(costs: PathCosts) -> tuple[str, ...] | None:
    """A device for each block, the cheapest path; of equals the one whose devices come first. None where a block has no
    candidate."""
    if not costs.blocks or not all(costs.blocks):
        return None
    enters = costs.enters
    total = {device: enters[device] + cost if enters else cost for device, cost in costs.blocks[0].items()}
    came: list[dict[str, str]] = []
    for row in costs.blocks[1:]:
        least = min(total, key=total.__getitem__)
        by_hop = total[least] + costs.hop
        after: dict[str, float] = {}
        before: dict[str, str] = {}
        for device, cost in row.items():
            stays, changes = total.get(device), by_hop + enters[device] if enters else by_hop
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


def path_cost(devices: Sequence[str], loads: Mapping[str, float], hop_cost: float) -> float:
    """What a path costs, given as a device for each block."""
    hops = sum(one != other for one, other in pairwise(devices))
    return sum(loads[device] for device in devices) / max(len(devices), 1) + hop_cost * hops


def choose_roomy(
    candidates: Sequence[Sequence[str]], pages: Sequence[int], capacity: Mapping[str, int], groups: int
) -> tuple[str, ...] | None:
    """For a sequence of so many page groups that the cheapest path does not hold: a device for each block, `pages` of a
    group there.

    A device is filled before the next one is taken, that with most room (first fit); where none has room for a
    block, the one that lacks least. Where that does not hold the sequence, other paths are tried, within limits: of
    these the one that holds most of it. None where a block has no candidate.
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
    """Page groups that one sequence can have along a path."""
    taken: Counter[str] = Counter()
    for device, more in zip(path, pages, strict=True):
        taken[device] += more
    return min((capacity[device] // more for device, more in taken.items() if more), default=0)


def _fitting(
    candidates: Sequence[Sequence[str]], pages: Sequence[int], capacity: Mapping[str, int], groups: int
) -> tuple[str, ...] | None:
    """Find a path that holds so many page groups, within `_TRIES` steps: depth first, block by block.

    What blocks take that are on one device only is not there for others, so it is taken off first.
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
    """Devices that have room for a block, the one to try first at the end: that of the block before it, then those with
    most room. A block without pages needs no second try."""
    if len(some) == 1:
        return list(some)
    fitting = (device for device in some if room[device] >= more)
    able = sorted(fitting, key=lambda device: (device == last, room[device]))
    return able if more else able[-1:]
