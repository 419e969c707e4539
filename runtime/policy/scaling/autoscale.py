"""When a block gets another instance or gives one back, and which sequences' pages move then (BL-24).

Contract: `scale` looks at each block by itself; other blocks of its chains are not touched.

    up      an instance whose queue is longer than `high` of what would fill its device gets another beside it, the most
            loaded first,
            while there is memory for it; sequences go over, fewest shared pages first (BL-18), until both hold
            about as many pages
    even    where it has another one whose queue is under `low`, they go there, and nothing is loaded: a further one
            would be as idle
    down    an instance that has had nothing to do for `idle`, if others of its block stay, each with a queue under
            `low`; sequences that
            are paused there move to them, or it stays

A block that was scaled within `calm` is left alone, and `low` lies under `high`: so the number of instances does
not swing. Where a new instance goes is `placement`'s to say. Pure: loads, memory and now in, what to do out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from runtime.policy.migration.order import Mover, order_moves
from runtime.policy.placement.locality import ClusterLayout, Instance, place
from runtime.policy.placement.locality import Policy as Placing


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """`high` and `low` as parts of the longest queue (the paper's t; it does not say which), `idle` and `calm` in
    nanoseconds. `most` new instances at once."""

    high: float = 0.8
    low: float = 0.4
    idle: int = 300_000_000_000
    calm: int = 60_000_000_000
    most: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"scaling down at {self.low} and up at {self.high} would swing")


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """A block instance. `queue`: rows waiting, of at most `longest` before memory is full. `held`: sequences whose
    pages are here and could move; `idle_since`: since when nothing waited or ran, nanoseconds; None while something
    does."""

    block: str
    device: str
    queue: int
    longest: int
    held: tuple[Mover, ...] = ()
    idle_since: int | None = None

    @property
    def part(self) -> float:
        """Of the longest queue."""
        return self.queue / self.longest if self.longest > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Up:
    """Load `block` on `device` because of the instance on `hot`; `part`: its queue. Then `moves`, in this order, go
    from there to it.
    """

    block: str
    device: str
    hot: str
    part: float
    moves: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Even:
    """`moves` go, in this order, from the instance on `hot` to the one on `device`, which is there already."""

    block: str
    device: str
    hot: str
    part: float
    moves: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScaleDown:
    """Drop `block` from `device` once `moves`, (sequence, device), are made."""

    block: str
    device: str
    moves: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scaling:
    """What to do. `refused`: blocks that need an instance that fits nowhere."""

    ups: tuple[Up, ...]
    downs: tuple[ScaleDown, ...]
    refused: tuple[str, ...]
    evens: tuple[Even, ...] = ()


def scale(
    loads: Sequence[BlockDemand],
    cluster: ClusterLayout,
    pages: Mapping[str, int],
    changed: Mapping[str, int],
    limits: ScalingLimits,
    now: int,
    placing: Placing = "locality",
) -> Scaling:
    """Decide for all instances.

    Args:
        cluster: devices with what is free for weights, instances, traffic; its instances are those of `loads`.
        pages: that may come to a device, of those that are free there. changed: when a block was last scaled,
            nanoseconds.
    """
    calm = [each for each in loads if now - changed.get(each.block, now - limits.calm) >= limits.calm]
    free = {each.device: pages.get(each.device, 0) for each in loads} | dict(pages)
    evens = _evens(calm, free, limits)
    served = {(each.block, each.hot) for each in evens}
    ups, refused = _ups(
        [each for each in calm if (each.block, each.device) not in served], cluster, free, limits, placing
    )
    grown = {up.block for up in ups} | {even.block for even in evens} | set(refused)
    downs = _downs([each for each in calm if each.block not in grown], free, limits, now)
    return Scaling(tuple(ups), tuple(downs), tuple(refused), tuple(evens))


def _evens(loads: Sequence[BlockDemand], pages: dict[str, int], limits: ScalingLimits) -> list[Even]:
    """For each instance that is too busy the least busy one of its block, where that is under `low`."""
    idle: dict[str, BlockDemand] = {}
    for each in loads:
        if each.part < limits.low and (each.block not in idle or each.part < idle[each.block].part):
            idle[each.block] = each
    evens: list[Even] = []
    for hot in sorted(loads, key=lambda each: (-each.part, each.block, each.device)):
        other = idle.get(hot.block)
        if hot.part > limits.high and other is not None:
            moves = _half(hot.held, pages.get(other.device, 0))
            pages[other.device] = pages.get(other.device, 0) - sum(len(each.pages) for each in moves)
            evens.append(Even(hot.block, other.device, hot.device, hot.part, tuple(each.seq for each in moves)))
    return evens


def _ups(
    loads: Sequence[BlockDemand], cluster: ClusterLayout, pages: dict[str, int], limits: ScalingLimits, placing: Placing
) -> tuple[list[Up], list[str]]:
    """One new instance for each that is too busy, while memory lasts."""
    ups: list[Up] = []
    refused: list[str] = []
    for hot in sorted(loads, key=lambda each: (-each.part, each.block, each.device)):
        if hot.part <= limits.high or len(ups) == limits.most:
            break
        found = place([hot.block], cluster, placing).placed
        if not found:
            refused.append(hot.block)
            continue
        device = found[0].device
        cluster = _with(cluster, hot.block, device)
        moves = _half(hot.held, pages.get(device, 0))
        pages[device] = pages.get(device, 0) - sum(len(each.pages) for each in moves)
        ups.append(Up(hot.block, device, hot.device, hot.part, tuple(each.seq for each in moves)))
    return ups, list(dict.fromkeys(refused))


def _with(cluster: ClusterLayout, block: str, device: str) -> ClusterLayout:
    """The cluster with one more instance."""
    nbytes = cluster.nbytes[block]
    devices = tuple(replace(each, free=each.free - nbytes) if each.name == device else each for each in cluster.devices)
    return replace(cluster, devices=devices, instances=(*cluster.instances, Instance(block, device)))


def _half(held: Sequence[Mover], room: int) -> list[Mover]:
    """Sequences to give away: up to half of all their pages, each as its own copy over there, in the order of BL-18."""
    left = min(room, sum(len(each.pages) for each in held) // 2)
    chosen: list[Mover] = []
    for one in order_moves(held):
        if len(one.mover.pages) <= left:
            left -= len(one.mover.pages)
            chosen.append(one.mover)
    return chosen


def _downs(loads: Sequence[BlockDemand], pages: dict[str, int], limits: ScalingLimits, now: int) -> list[ScaleDown]:
    """At most one instance of each block: the one that has been idle for longest, if what is paused there finds room
    elsewhere.
    """
    by_block: dict[str, list[BlockDemand]] = {}
    for each in loads:
        by_block.setdefault(each.block, []).append(each)
    downs: list[ScaleDown] = []
    for block, instances in sorted(by_block.items()):
        idle = [
            (each.idle_since, each)
            for each in instances
            if each.idle_since is not None and now - each.idle_since >= limits.idle
        ]
        if not idle or len(instances) < 2:
            continue
        leaving = min(idle, key=lambda one: (one[0], one[1].device))[1]
        others = [each for each in instances if each is not leaving]
        moves = _elsewhere(leaving.held, others, pages)
        if moves is not None and all(each.part < limits.low for each in others):
            for mover, device in moves:
                pages[device] -= len(mover.pages)
            downs.append(ScaleDown(block, leaving.device, tuple((mover.seq, device) for mover, device in moves)))
    return downs


def _elsewhere(
    held: Sequence[Mover], others: Sequence[BlockDemand], pages: Mapping[str, int]
) -> list[tuple[Mover, str]] | None:
    """A device for each sequence, the one with the most room; None if one finds none."""
    room = {each.device: pages.get(each.device, 0) for each in others}
    moves: list[tuple[Mover, str]] = []
    for one in order_moves(held):
        device = max(room, key=lambda each: room[each])
        room[device] -= len(one.mover.pages)
        if room[device] < 0:
            return None
        moves.append((one.mover, device))
    return moves
