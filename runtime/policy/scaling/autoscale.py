"""Decide when a block gets another instance or drops one, and which sequences' pages move then (BL-24).

`scale` decides for each block separately; other blocks of its chains are not touched.

    up      an instance with a queue over `high` of what would fill its device gets another one beside it, the most
            loaded first, while there is memory; sequences move there, fewest shared pages first (BL-18), until both
            hold about the same number of pages
    even    if the block has another instance with a queue under `low`, the sequences move there and nothing is loaded,
            because a further instance would be as idle
    down    an instance without work for `idle` is dropped if the block has other instances, each with a queue under
            `low`, and its paused sequences find room there

A block that was scaled within `calm` is left alone, and `low` is below `high`, so the number of instances does not
oscillate. `placement.locality` chooses the device of a new instance. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from runtime.policy.migration.order import Mover, order_moves
from runtime.policy.placement.locality import ClusterLayout, Instance, place
from runtime.policy.placement.locality import Policy as Placing


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """Configure scaling.

    Fields:
        high, low: Shares of the longest queue (the paper's t; it gives no values).
        idle: Nanoseconds without work after which an instance may be dropped.
        calm: Nanoseconds that a scaled block is left alone.
        most: Most new instances at once.
    """

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
    """Describe the load of a block instance.

    Fields:
        queue: Rows waiting.
        longest: Most rows that can wait before memory is full.
        held: Sequences with pages here that could move.
        idle_since: Since when nothing waits or runs, in ns; None while something does.
    """

    block: str
    device: str
    queue: int
    longest: int
    held: tuple[Mover, ...] = ()
    idle_since: int | None = None

    @property
    def part(self) -> float:
        """Return the queue as a share of the longest queue."""
        return self.queue / self.longest if self.longest > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Up:
    """Load `block` on `device` to relieve the instance on `hot`, then move sequences there.

    Fields:
        part: Queue of the instance on `hot`, as a share of the longest queue.
        moves: Sequences that move, in this order.
    """

    block: str
    device: str
    hot: str
    part: float
    moves: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Even:
    """Move sequences, in this order, from the instance on `hot` to the existing one on `device`."""

    block: str
    device: str
    hot: str
    part: float
    moves: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScaleDown:
    """Drop `block` from `device` after its `moves`, as (sequence, device)."""

    block: str
    device: str
    moves: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scaling:
    """Hold the decisions. `refused`: blocks that need an instance that fits nowhere."""

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
        cluster: Devices with free bytes for weights, instances, traffic; its instances are those of `loads`.
        pages: Pages that may be moved to each device, out of its free ones.
        changed: When each block was last scaled, in ns.
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
    """Pair each overloaded instance with the least loaded one of its block, if that is under `low`."""
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
    """Choose a new instance for each overloaded one, while memory lasts."""
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
    """Return the layout with one more instance."""
    nbytes = cluster.nbytes[block]
    devices = tuple(replace(each, free=each.free - nbytes) if each.name == device else each for each in cluster.devices)
    return replace(cluster, devices=devices, instances=(*cluster.instances, Instance(block, device)))


def _half(held: Sequence[Mover], room: int) -> list[Mover]:
    """Choose sequences to move, with up to half of all their pages, in the order of BL-18.

    Shared pages count once per sequence, because each moves with its own copy.
    """
    left = min(room, sum(len(each.pages) for each in held) // 2)
    chosen: list[Mover] = []
    for one in order_moves(held):
        if len(one.mover.pages) <= left:
            left -= len(one.mover.pages)
            chosen.append(one.mover)
    return chosen


def _downs(loads: Sequence[BlockDemand], pages: dict[str, int], limits: ScalingLimits, now: int) -> list[ScaleDown]:
    """Choose at most one instance per block to drop: the one idle for longest.

    It is dropped only if the other instances have room for its paused sequences and queues under `low`.
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
    """Choose a device for each sequence, the one with the most room; None if one finds no room."""
    room = {each.device: pages.get(each.device, 0) for each in others}
    moves: list[tuple[Mover, str]] = []
    for one in order_moves(held):
        device = max(room, key=lambda each: room[each])
        room[device] -= len(one.mover.pages)
        if room[device] < 0:
            return None
        moves.append((one.mover, device))
    return moves
