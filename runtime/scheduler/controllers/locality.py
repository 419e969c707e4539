"""Move instances next to those with which they exchange rows, period by period (BL-26).

`policy.placement.locality.rearrange` decides on the traffic that `placement.traffic` has counted.

A row that changes its device waits for that device's step to end, half a step on average; between servers the time of
a hop is added. Both are learned (`scheduler.observe.measured_times`), so rows that stay on one device are worth most.

Contract:
- `decide` is called once per period, and skipped while moves of the last period are pending; `look` on every tick.
- A move loads at its target first, migrates the sequences at its source, then drains there.
- Moves begin in the order of the decision, each when its target has room (earlier moves may have made it), and only
  where no sequence's possible length shrinks. A move that cannot begin in time is dropped.
- Only the busiest pairs of blocks, and `_INSTANCES` of their instances, are considered, so that a decision has a
  bounded cost.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.policy.placement.locality import ClusterLayout, Instance, InstanceMove, MoveCosts, rearrange
from runtime.policy.placement.locality import DeviceRoom as Place
from runtime.policy.placement.traffic import NEAR
from runtime.scheduler.controllers.actions import Actions, Drain
from runtime.scheduler.placement.traffic import TrafficCounter
from runtime.scheduler.state import ClusterState

_MS = 1_000_000
#: Limits of a decision: pairs of blocks, instances of them, and steps of the search.
_PAIRS, _INSTANCES, _EFFORT = 128, 512, 400


@dataclass(frozen=True, slots=True)
class _Planned:
    """A move that has not begun.

    Fields:
        until: Time in ns after which it is dropped.
        weights: Weight of the traffic before and after all moves of the decision.
    """

    move: InstanceMove
    until: int
    weights: Mapping[str, float]


class LocalityController:
    """Decide and begin moves of instances."""

    def __init__(self, state: ClusterState, actions: Actions, traffic: TrafficCounter) -> None:
        config = state.config.control
        self._state = state
        self._actions = actions
        self._traffic = traffic
        self._costs = MoveCosts(0.0, 0.0, period=config.rearrange_interval_ms * _MS)
        self._patience = config.migration_timeout_ms * _MS
        self._moved: dict[tuple[str, str], int] = {}
        self._todo: deque[_Planned] = deque()

    def decide(self, now: int) -> None:
        """Plan moves at the end of a traffic period."""
        self._moved = {each: when for each, when in self._moved.items() if now - when < self._costs.period}
        if self._todo:
            return
        cluster = self._cluster(now)
        if not cluster.pairs:
            return
        costs = replace(
            self._costs, crossing=self._crossing() + self._wait(), nbyte=self._state.times.loads.seconds_per_byte
        )
        found = rearrange(cluster, costs, now, _EFFORT)
        weights = {"before": found.before.weight, "after": found.after.weight}
        self._todo.extend(_Planned(move, now + self._patience, weights) for move in found.moves)

    def look(self, now: int) -> None:
        """Begin the moves that can begin now."""
        while self._todo:
            planned = self._todo[0]
            move = planned.move
            if self._stands(move) and now <= planned.until:
                if self._state.devices[move.target].plan.room < self._state.block_map.block(move.block).nbytes:
                    return
                self._begin(planned, now)
            self._todo.popleft()

    def _stands(self, move: InstanceMove) -> bool:
        """Return whether a move is still valid, and does not limit the length of sequences."""
        state, placed = self._state, self._state.block_map
        where = placed.instances.get(move.block, ())
        if move.source not in where or move.target in where or (move.block, move.source) in placed.leaving:
            return False
        alive = state.devices.alive(move.source) and state.devices.alive(move.target)
        return alive and not state.router.spoils(state.in_use(), move.block, move.source, move.target)

    def _begin(self, planned: _Planned, now: int) -> None:
        move = planned.move
        extra = {"from": move.source, "saved": round(move.saved, 1), **planned.weights}
        self._state.tell.control(now, "placement.move", "BL-26", move.target, move.block, **extra)
        self._moved[move.block, move.target] = now
        self._actions.grow([move.block], move.target, "BL-26", now)
        drain = Drain(frozenset([move.block]), move.source, move.target, now + self._patience, "BL-26")
        if self._actions.drain(drain) is not None:  # the old instance stays: no copy is wanted
            self._actions.withdraw([move.block], move.target, "BL-26", now)

    def _crossing(self) -> float:
        """Return the seconds that a row loses between two servers."""
        return self._state.times.hop_seconds(False, 0, False)

    def _wait(self) -> float:
        """Return the seconds that a row waits for the step of a device it enters: half of a mean step."""
        devices = [device for device in self._state.devices if device.alive]
        steps, busy = sum(device.work.steps for device in devices), sum(device.work.busy for device in devices) / 1e9
        return busy / steps / 2 if steps else 0.0

    def _cluster(self, now: int) -> ClusterLayout:
        """Return the blocks that exchange most rows, their instances, and the candidate devices."""
        state, traffic = self._state, self._traffic
        pairs = dict(heapq.nlargest(_PAIRS, traffic.pairs.items(), key=lambda each: each[1]))
        instances: list[Instance] = []
        for block in dict.fromkeys(block for pair in pairs for block in pair):
            where = state.block_map.instances.get(block, ())
            if len(instances) + len(where) > _INSTANCES:
                continue
            some = (
                name for name in where if state.devices.alive(name) and (block, name) not in state.block_map.leaving
            )
            began = now - self._costs.period
            instances += [Instance(block, name, self._moved.get((block, name), began)) for name in some]
        known = {each.block for each in instances}
        pairs = {pair: rows for pair, rows in pairs.items() if known.issuperset(pair)}
        there = {each.device for each in instances}
        servers = {state.devices[name].facts.server for name in there}
        near = (each for each in state.devices if each.alive and (each.name in there or each.facts.server in servers))
        devices = heapq.nlargest(_INSTANCES, near, key=lambda each: (each.name in there, each.plan.room))
        places = tuple(Place(each.name, each.facts.server, each.plan.room) for each in devices)
        nbytes = {block: state.block_map.block(block).nbytes for block in known}
        wait = self._wait()
        hop = max(NEAR, wait / (wait + self._crossing())) if wait else NEAR
        return ClusterLayout(places, tuple(instances), nbytes, pairs, hop)
