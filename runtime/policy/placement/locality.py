"""Place block instances near those they exchange rows with (BL-26), or packed tightly (its baseline).

    traffic(a, b)  = rows that went from block a directly to block b in a period, counted: `ClusterLayout.pairs`
    crossing(a, b) = traffic(a, b) * the share of a's instances on servers without a b

An instance of a sends to a b on its server if there is one, and a's instances are assumed to be used equally.
`locality` minimises the sum of crossings between servers plus, at a small weight, those between devices of one server;
on one device there is no hop (BL-15).

`place` finds devices for new instances. `rearrange` moves existing ones if it pays: the gain of saved crossings per
period must exceed the cost of loading by a margin, and an instance that moved within the last period stays
(hysteresis).

Neither plans more bytes onto a device than are free. A move loads before it drops, so it needs room at its target while
the old instance stands. At most one instance of a block is on a device.

Both are greedy with a local search over single moves and swaps, so the result is not always optimal (a test reports the
gap on small clusters). Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from runtime.policy.placement.traffic import NEAR, Pairs, Traffic, TrafficLedger, TrafficStep

Policy = Literal["locality", "frag-min"]


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """Describe a device. `free`: bytes for weights, beyond those of its instances."""

    name: str
    server: str
    free: int


@dataclass(frozen=True, slots=True)
class Instance:
    """Describe a block on a device. `moved`: when it was placed there, in nanoseconds."""

    block: str
    device: str
    moved: int = 0


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Describe a cluster.

    Fields:
        nbytes: Bytes of each block.
        pairs: (sender, receiver) -> rows in the period.
        near: Cost of a row between two devices of a server, relative to one between servers.
    """

    devices: tuple[DeviceRoom, ...]
    instances: tuple[Instance, ...]
    nbytes: Mapping[str, int]
    pairs: Pairs
    near: float = NEAR


@dataclass(frozen=True, slots=True)
class PlacedInstance:
    """Describe a new instance of a block. `left`: bytes free on its device after all are placed."""

    block: str
    device: str
    left: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Hold where new instances go.

    Fields:
        unplaced: Blocks that found no room.
        traffic: Traffic of all instances after the placement.
    """

    placed: tuple[PlacedInstance, ...]
    unplaced: tuple[str, ...]
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """Configure when moving an instance pays.

    Fields:
        crossing: Seconds that a row loses on a hop between servers.
        nbyte: Seconds to load one byte on another device.
        margin: The gain must be this many times the cost.
        period: Nanoseconds that an instance stays at least.
        most: Most moves at once.
    """

    crossing: float
    nbyte: float
    margin: float = 1.5
    period: int = 60_000_000_000
    most: int = 8


@dataclass(frozen=True, slots=True)
class InstanceMove:
    """Load a block on `target`, then drain and drop it on `source`. Moves are made in order, one at a time.

    Fields:
        saved: Weighted crossings saved per period.
        gain, cost: Seconds. Both moves of a swap carry the values of the pair.
    """

    block: str
    source: str
    target: str
    saved: float
    gain: float
    cost: float


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """Hold the moves, best first, and the traffic per period before and after them."""

    moves: tuple[InstanceMove, ...]
    before: Traffic
    after: Traffic


def blend(
    before: Mapping[tuple[str, str], float], latest: Mapping[tuple[str, str], float], keep: float = 0.5
) -> dict[tuple[str, str], float]:
    """Return counters for the next decision: the last period's, plus `keep` times the earlier ones.

    Pairs with a small count are dropped.
    """
    mixed = {pair: keep * before.get(pair, 0.0) + latest.get(pair, 0.0) for pair in sorted({*before, *latest})}
    return {pair: count for pair, count in mixed.items() if count >= 0.5}


def place(
    blocks: Sequence[str], cluster: ClusterLayout, policy: Policy = "locality", effort: int = 20_000
) -> Placement:
    """Find devices for new instances of `blocks`; a block listed twice gets two.

    `effort`: most steps of the local search.

    frag-min is best fit: larger blocks first, each where the least is left over.
    """
    by_size = sorted(blocks, key=lambda block: (-cluster.nbytes[block], block))
    if policy == "frag-min":
        return _result(_filled(by_size, cluster, packed=True), blocks, cluster)
    results = []
    for order, packed in ((by_size, True), (by_size, False), (_by_traffic(by_size, cluster), False)):
        ledger, placed = _filled(order, cluster, packed)
        _improve(ledger, placed, effort // 3)
        results.append(_result((ledger, placed), blocks, cluster))
    return min(results, key=lambda one: (len(one.unplaced), one.traffic.weight))


def rearrange(cluster: ClusterLayout, costs: MoveCosts, now: int, effort: int = 5_000) -> Rearrangement:
    """Return the moves that pay under recent traffic, without instances that moved within the last period.

    `effort`: most steps considered.
    """
    ledger = _ledger(cluster)
    before = ledger.traffic()
    settled = {(each.block, each.device) for each in cluster.instances if now - each.moved >= costs.period}
    offers = [made for steps in islice(_steps(ledger, settled), effort) if (made := _valued(steps, ledger, costs))]
    moves: list[InstanceMove] = []
    for offer in sorted(offers, key=lambda made: made[0].cost - made[0].gain):
        steps = tuple(TrafficStep(move.block, move.source, move.target) for move in offer)
        if len(moves) + len(steps) > costs.most or not {(step.block, step.source) for step in steps} <= settled:
            continue
        # earlier moves of this plan have changed the layout
        again = _valued(steps, ledger, costs) if ledger.allows(steps, transient=True) else ()
        for move, step in zip(again, steps, strict=False):
            ledger.move(step)
            settled.discard((move.block, move.source))
        moves.extend(again)
    return Rearrangement(tuple(moves), before, ledger.traffic())


# -- steps -------------------------------------------------------------------------------------------------------------


def _steps(ledger: TrafficLedger, movable: Collection[tuple[str, str]]) -> Iterator[tuple[TrafficStep, ...]]:
    """Yield all steps of instances that may move, those with the most traffic first."""
    there = _by_device(movable)
    for block, source in _busiest(ledger, movable):
        yield from _steps_of(ledger, block, source, there, transient=True)


def _steps_of(
    ledger: TrafficLedger, block: str, source: str, there: Mapping[str, Sequence[str]], transient: bool
) -> Iterator[tuple[TrafficStep, ...]]:
    """Yield steps that bring an instance to a server of its partners.

    - The instance alone, where there is room.
    - Otherwise together with another one that makes room, which goes to the first one's device or to its best fit.
    - The instance and a partner, to a device that holds both.
    """
    for target in ledger.near_to(block):
        here = TrafficStep(block, source, target)
        if ledger.has(block, target):
            continue
        if ledger.allows([here], transient):
            yield (here,)
            continue
        for other in there.get(target, ()):
            for aside in dict.fromkeys((source, ledger.best_fit(other))):
                if aside is not None and aside != target:
                    yield from _allowed(ledger, (TrafficStep(other, target, aside), here), transient)
    for partner, device in ledger.partners(block):
        target_for_both = ledger.best_fit(block, beside=partner)
        if target_for_both is not None and partner in there.get(device, ()):
            yield from _allowed(
                ledger,
                (TrafficStep(block, source, target_for_both), TrafficStep(partner, device, target_for_both)),
                transient,
            )


def _allowed(
    ledger: TrafficLedger, steps: tuple[TrafficStep, ...], transient: bool
) -> Iterator[tuple[TrafficStep, ...]]:
    if ledger.allows(steps, transient):
        yield steps


def _busiest(ledger: TrafficLedger, instances: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the instances with traffic to save, the most first."""
    weights = {block: ledger.weight_of([block]) for block in {block for block, _ in instances}}
    return sorted((each for each in instances if weights[each[0]]), key=lambda each: (-weights[each[0]], each))


def _by_device(instances: Collection[tuple[str, str]]) -> dict[str, list[str]]:
    there: dict[str, list[str]] = {}
    for block, device in sorted(instances):
        there.setdefault(device, []).append(block)
    return there


def _valued(steps: tuple[TrafficStep, ...], ledger: TrafficLedger, costs: MoveCosts) -> tuple[InstanceMove, ...]:
    """Return the steps as moves if they pay, else an empty tuple."""
    saved = ledger.saved_by(steps)
    gain = saved * costs.crossing
    cost = sum(ledger.nbytes[step.block] for step in steps) * costs.nbyte
    if saved <= 0 or gain <= costs.margin * cost:
        return ()
    return tuple(InstanceMove(step.block, step.source, step.target, saved, gain, cost) for step in steps)


# -- new instances -----------------------------------------------------------------------------------------------------


def _ledger(cluster: ClusterLayout) -> TrafficLedger:
    servers = {each.name: each.server for each in cluster.devices}
    free = {each.name: each.free for each in cluster.devices}
    for each in cluster.instances:
        free[each.device] += cluster.nbytes[each.block]  # `ledger.add` subtracts it again
    ledger = TrafficLedger(servers, free, cluster.nbytes, cluster.pairs, cluster.near)
    for each in cluster.instances:
        ledger.add(each.block, each.device)
    return ledger


def _by_traffic(blocks: Sequence[str], cluster: ClusterLayout) -> list[str]:
    """Return blocks in the order in which the busiest pairs contain them, the rest behind."""
    pairs = sorted(cluster.pairs, key=lambda pair: (-cluster.pairs[pair], pair))
    rank = {block: place for place, block in reversed(list(enumerate(block for pair in pairs for block in pair)))}
    return sorted(blocks, key=lambda block: rank.get(block, len(pairs) * 2))


def _filled(blocks: Sequence[str], cluster: ClusterLayout, packed: bool) -> _Filled:
    """Place blocks one after another.

    `packed`: where the least is left over; otherwise where the least traffic is added, of equals where the least is
    left.
    """
    ledger = _ledger(cluster)
    placed: list[tuple[str, str]] = []
    for block in blocks:
        near = [] if packed else [each for each in ledger.near_to(block) if ledger.fits(block, each)]
        anywhere = ledger.best_fit(block)
        if anywhere is None:
            continue
        device = min(near, key=lambda each: (ledger.weight_with(block, each), ledger.free[each]), default=anywhere)
        ledger.add(block, device)
        placed.append((block, device))
    return ledger, placed


def _improve(ledger: TrafficLedger, placed: list[tuple[str, str]], effort: int) -> None:
    """Apply each instance's best step, round after round, until none saves traffic or `effort` steps are used up.

    Changes are made in place, because nothing is loaded yet.
    """
    improved = True
    while improved and effort > 0:
        improved = False
        for block, source in _busiest(ledger, placed):
            if (block, source) not in placed:
                continue  # it was moved to make room in this round
            steps = list(islice(_steps_of(ledger, block, source, _by_device(placed), transient=False), effort))
            effort -= len(steps)
            saved, best = max(
                ((ledger.saved_by(each), each) for each in steps), key=lambda made: made[0], default=(0.0, ())
            )
            if saved > 1e-9:
                improved = True
                _take(ledger, placed, best)


def _take(ledger: TrafficLedger, placed: list[tuple[str, str]], steps: tuple[TrafficStep, ...]) -> None:
    for step in steps:
        ledger.move(step)
        placed[placed.index((step.block, step.source))] = (step.block, step.target)


def _result(filled: _Filled, blocks: Sequence[str], cluster: ClusterLayout) -> Placement:
    ledger, placed = filled
    unplaced = Counter(blocks) - Counter(block for block, _ in placed)
    return Placement(
        tuple(PlacedInstance(block, device, ledger.free[device]) for block, device in placed),
        tuple(unplaced.elements()),
        ledger.traffic(),
    )


_Filled = tuple[TrafficLedger, list[tuple[str, str]]]
