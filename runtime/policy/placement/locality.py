"""On which devices block instances should be: near those they exchange rows with (BL-26), or packed tightly (its
baseline).

    traffic(a, b)  = rows that went from block a straight to block b in a period, counted: `ClusterLayout.pairs`
    crossing(a, b) = traffic(a, b) * the part of a's instances on whose server there is no b

for an instance of a sends to a b beside it if there is one, and a's instances are taken to be used alike. `locality`
makes small the sum of crossings between servers and, at a small weight, those between devices of one server: on one
device there is no hop (BL-15).

`place` finds devices for instances that are not there yet; `rearrange` moves ones that are, when that pays: what the
crossings saved in a period cost must exceed what loading costs by a margin, and whoever moved within the last period
stays (hysteresis). Both never plan more bytes onto a device than are free there. A move loads before it drops, so it
needs room at its target while the old one stands, and no instance is ever gone before its replacement is there. At most
one instance of a block is on a device.

Quality: greedy starts and a local search over single moves and swaps; not always the best (a test reports how far off
on small clusters).
Pure: it knows counters, bytes and names, no profiles and no clock.
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
    """`free`: bytes for weights beside those of the instances that are there."""

    name: str
    server: str
    free: int


@dataclass(frozen=True, slots=True)
class Instance:
    """A block on a device. `moved`: when it came there, nanoseconds."""

    block: str
    device: str
    moved: int = 0


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """What there is. `nbytes` of each block; `pairs`: (sender, receiver) -> rows in the period; `near`: what a row
    between two devices of a server costs, of one between servers."""

    devices: tuple[DeviceRoom, ...]
    instances: tuple[Instance, ...]
    nbytes: Mapping[str, int]
    pairs: Pairs
    near: float = NEAR


@dataclass(frozen=True, slots=True)
class PlacedInstance:
    """A new instance of a block. `left`: bytes free on its device when all are placed."""

    block: str
    device: str
    left: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where new instances go. `unplaced`: blocks that found no room. `traffic`: of all instances then."""

    placed: tuple[PlacedInstance, ...]
    unplaced: tuple[str, ...]
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """`crossing`: seconds that a row loses on a hop between servers; `nbyte`: seconds to load a byte elsewhere. A move
    must gain `margin` times what it costs, and an instance stays for at least `period` nanoseconds."""

    crossing: float
    nbyte: float
    margin: float = 1.5
    period: int = 60_000_000_000
    most: int = 8


@dataclass(frozen=True, slots=True)
class InstanceMove:
    """Load a block on `target`, then drain and drop it on `source`. Moves are made in order, each one whole before the
    next.

    `saved`: weighted crossings per period; `gain`, `cost`: seconds. The two moves of a swap carry those of both
    together.
    """

    block: str
    source: str
    target: str
    saved: float
    gain: float
    cost: float


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """Moves, best first, and the traffic per period without and with them."""

    moves: tuple[InstanceMove, ...]
    before: Traffic
    after: Traffic


def blend(
    before: Mapping[tuple[str, str], float], latest: Mapping[tuple[str, str], float], keep: float = 0.5
) -> dict[tuple[str, str], float]:
    """Counters for the next decision: those of the last period, and `keep` of what was before. Pairs that have faded
    are dropped.
    """
    mixed = {pair: keep * before.get(pair, 0.0) + latest.get(pair, 0.0) for pair in sorted({*before, *latest})}
    return {pair: count for pair, count in mixed.items() if count >= 0.5}


def place(
    blocks: Sequence[str], cluster: ClusterLayout, policy: Policy = "locality", effort: int = 20_000
) -> Placement:
    """Find devices for new instances of `blocks` (one named twice gets two). `effort`: steps that the local search may
    look at.

    frag-min is best fit: larger blocks first, each where least is left over.
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
    """Moves that pay, given how rows went lately; none of an instance that came within the last period. `effort`: steps
    looked at.
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
        again = _valued(steps, ledger, costs) if ledger.allows(steps, transient=True) else ()  # others have moved since
        for move, step in zip(again, steps, strict=False):
            ledger.move(step)
            settled.discard((move.block, move.source))
        moves.extend(again)
    return Rearrangement(tuple(moves), before, ledger.traffic())


# -- steps -------------------------------------------------------------------------------------------------------------


def _steps(ledger: TrafficLedger, movable: Collection[tuple[str, str]]) -> Iterator[tuple[TrafficStep, ...]]:
    """All steps of instances that may move, those with the most traffic first."""
    there = _by_device(movable)
    for block, source in _busiest(ledger, movable):
        yield from _steps_of(ledger, block, source, there, transient=True)


def _steps_of(
    ledger: TrafficLedger, block: str, source: str, there: Mapping[str, Sequence[str]], transient: bool
) -> Iterator[tuple[TrafficStep, ...]]:
    """Steps that bring an instance to a server of its partners: alone where there is room, else together with one that
    makes room, which goes to where the first one was or to where it fits best; and steps that bring it and a partner to
    a device that holds both."""
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
    """Those that have traffic to save, the most first."""
    weights = {block: ledger.weight_of([block]) for block in {block for block, _ in instances}}
    return sorted((each for each in instances if weights[each[0]]), key=lambda each: (-weights[each[0]], each))


def _by_device(instances: Collection[tuple[str, str]]) -> dict[str, list[str]]:
    there: dict[str, list[str]] = {}
    for block, device in sorted(instances):
        there.setdefault(device, []).append(block)
    return there


def _valued(steps: tuple[TrafficStep, ...], ledger: TrafficLedger, costs: MoveCosts) -> tuple[InstanceMove, ...]:
    """The steps as moves, if they pay; else none."""
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
        free[each.device] += cluster.nbytes[each.block]  # adding it takes that off again
    ledger = TrafficLedger(servers, free, cluster.nbytes, cluster.pairs, cluster.near)
    for each in cluster.instances:
        ledger.add(each.block, each.device)
    return ledger


def _by_traffic(blocks: Sequence[str], cluster: ClusterLayout) -> list[str]:
    """Blocks in the order in which the busiest pairs name them; the rest behind them."""
    pairs = sorted(cluster.pairs, key=lambda pair: (-cluster.pairs[pair], pair))
    rank = {block: place for place, block in reversed(list(enumerate(block for pair in pairs for block in pair)))}
    return sorted(blocks, key=lambda block: rank.get(block, len(pairs) * 2))


def _filled(blocks: Sequence[str], cluster: ClusterLayout, packed: bool) -> _Filled:
    """One after another: where least is left over, or where least traffic is added and of equals least is left over."""
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
    """Let each instance take its best step, round after round, until none saves traffic or `effort` steps have been
    looked at. In place: nothing is loaded yet."""
    improved = True
    while improved and effort > 0:
        improved = False
        for block, source in _busiest(ledger, placed):
            if (block, source) not in placed:
                continue  # it made room for another in this round
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
