"""Which devices run a new sequence, block by block: the least loaded that have the block, hops weighed against loads
(BL-13, BL-15).

    cost of a path = sum over blocks of load(device) / blocks  +  hop_cost for each change of device

Pure: loads are the caller's, in sequences. The K and V of a sequence that has run stay where they are; only `dispatch`
weighs that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise


def choose_devices(
    candidates: Sequence[Sequence[str]], loads: Mapping[str, float], hop_cost: float
) -> tuple[str, ...] | None:
    """A device for each block, the cheapest path; of equals the one whose devices come first. None where a block has no
    candidate.
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
    """The same with a cost of its own for each block on each device, in seconds (BL-21), and `hop` seconds for a change
    of device.
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
    """For a sequence of so many page groups that the cheapest path does not hold: a device for each block, `pages` of a
    group there.

    A device is filled before the next one is taken, that with most room (first fit); where none has room for a block,
    the one that lacks least. None where a block has no candidate.
    """
    if not candidates or not all(candidates):
        return None
    room = {device: capacity[device] for some in candidates for device in some}
    path: list[str] = []
    for some, more in zip(candidates, pages, strict=True):
        stays = bool(path) and path[-1] in some and room[path[-1]] >= more * groups
        path.append(path[-1] if stays else max(some, key=room.__getitem__))
        room[path[-1]] -= more * groups
    return tuple(path)
