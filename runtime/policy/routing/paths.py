"""Which devices run a new sequence, block by block: the least loaded that have the block, hops weighed against
loads (BL-13, BL-15).

    cost of a path = sum over blocks of load(device) / blocks  +  hop_cost for each change of device

Pure: loads are the caller's, in sequences. The K and V of a sequence that has run stay where they are; only
`dispatch` weighs that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

#: Steps of the search for a path that holds a long sequence, for each length that is tried.
_TRIES = 512


def choose_devices(
    candidates: Sequence[Sequence[str]], loads: Mapping[str, float], hop_cost: float
) -> tuple[str, ...] | None:
    """A device for each block, the cheapest path; of equals the one whose devices come first. None where a block
    has no candidate.
    """
    if not candidates or not all(candidates):
        return None
    if len(candidates) == 1:
        return (min(candidates[0], key=loads.__getitem__),)
    share = 1.0 / len(candidates)
    costs = {device: loads[device] * share for device in candidates[0]}
    came: list[dict[str, str]] = []
    for some in candidates[1:]:
        cheapest = min(costs, key=costs.__getitem__)
        by_hop = costs[cheapest] + hop_cost
        after: dict[str, float] = {}
        before: dict[str, str] = {}
        for device in some:
            stays = costs.get(device)
            if stays is not None and stays <= by_hop:
                after[device], before[device] = stays + loads[device] * share, device
            else:
                after[device], before[device] = by_hop + loads[device] * share, cheapest
        costs = after
        came.append(before)
    last = min(costs, key=costs.__getitem__)
    path = [last]
    for before in reversed(came):
        path.append(before[path[-1]])
    return tuple(reversed(path))


def path_cost(devices: Sequence[str], loads: Mapping[str, float], hop_cost: float) -> float:
    """What a path costs, given as a device for each block."""
    hops = sum(one != other for one, other in pairwise(devices))
    return sum(loads[device] for device in devices) / max(len(devices), 1) + hop_cost * hops


def choose_by_cost(costs: Sequence[Mapping[str, float]], hop: float) -> tuple[str, ...] | None:
    """The same with a cost of its own for each block on each device, in seconds (BL-21), and `hop` seconds for a
    change of device.
    """
    if not costs or not all(costs):
        return None
    total = dict(costs[0])
    came: list[dict[str, str]] = []
    for some in costs[1:]:
        cheapest = min(total, key=total.__getitem__)
        before = {
            device: device if total.get(device, math.inf) <= total[cheapest] + hop else cheapest for device in some
        }
        total = {
            device: min(total.get(device, math.inf), total[cheapest] + hop) + cost for device, cost in some.items()
        }
        came.append(before)
    path = [min(total, key=total.__getitem__)]
    for before in reversed(came):
        path.append(before[path[-1]])
    return tuple(reversed(path))


def choose_roomy(
    candidates: Sequence[Sequence[str]], pages: Sequence[int], capacity: Mapping[str, int], groups: int
) -> tuple[str, ...] | None:
    """For a sequence of so many page groups that the cheapest path does not hold: a device for each block, `pages`
    of a group there.

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
