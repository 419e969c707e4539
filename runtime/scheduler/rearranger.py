"""Instances move to whom they exchange rows with, period by period (BL-26): `policy.placement.rearrange` over what `flow` has counted.

A move loads at its target first, hands over who runs at its source, and then drops there. Contract: `look` on every tick; it decides once
in a period. Only the busiest pairs of blocks and `_INSTANCES` of their instances are looked at, so that what a decision costs has a bound.
"""

from __future__ import annotations

import heapq

from runtime.policy.placement import Cluster, Instance, MoveCosts, rearrange
from runtime.policy.placement import Device as Place
from runtime.scheduler.flow import Flow
from runtime.scheduler.orders import Drain, Orders
from runtime.scheduler.state import ClusterState

_MS = 1_000_000
#: Pairs of blocks, and instances of them, that a decision looks at; and steps.
_PAIRS, _INSTANCES, _EFFORT = 128, 512, 400


class Rearranger:
    def __init__(self, state: ClusterState, orders: Orders, flow: Flow) -> None:
        config = state.config.control
        self._state = state
        self._orders = orders
        self._flow = flow
        self._costs = MoveCosts(config.crossing_us / 1e6, 1 / config.bandwidth, period=config.period_ms * _MS)
        self._patience = config.patience_ms * _MS
        self._moved: dict[tuple[str, str], int] = {}
        self._begun: int | None = None

    def look(self, now: int) -> None:
        """Decide, where a period is over."""
        if self._begun is None:
            self._begun = now
        if now - self._begun < self._costs.period:
            return
        self._begun = now
        self._flow.turn()
        self._moved = {each: when for each, when in self._moved.items() if now - when < self._costs.period}
        self._decide(now)

    def _decide(self, now: int) -> None:
        state = self._state
        cluster = self._cluster(now)
        if not cluster.pairs:
            return
        found = rearrange(cluster, self._costs, now, _EFFORT)
        for move in found.moves:
            extra = {"from": move.source, "saved": round(move.saved, 1), "before": found.before.weight, "after": found.after.weight}
            state.tell.control(now, "placement.move", "BL-26", move.target, move.block, **extra)
            self._moved[move.block, move.target] = now
            self._orders.grow([move.block], move.target, "BL-26", now)
            self._orders.drain(Drain(frozenset([move.block]), move.source, move.target, now + self._patience, "BL-26"))

    def _cluster(self, now: int) -> Cluster:
        """The blocks that exchange most rows, where they are, and the devices that they could go to."""
        state, flow = self._state, self._flow
        pairs = dict(heapq.nlargest(_PAIRS, flow.pairs.items(), key=lambda each: each[1]))
        instances: list[Instance] = []
        for block in dict.fromkeys(block for pair in pairs for block in pair):
            where = state.provision.instances.get(block, ())
            if len(instances) + len(where) > _INSTANCES:
                continue
            some = (name for name in where if state.devices.alive(name) and (block, name) not in state.provision.leaving)
            began = now - self._costs.period
            instances += [Instance(block, name, self._moved.get((block, name), began)) for name in some]
        known = {each.block for each in instances}
        pairs = {pair: rows for pair, rows in pairs.items() if known.issuperset(pair)}
        there = {each.device for each in instances}
        servers = {state.devices[name].server for name in there}
        near = (each for each in state.devices if each.alive and (each.name in there or each.server in servers))
        devices = heapq.nlargest(_INSTANCES, near, key=lambda each: (each.name in there, each.room))
        places = tuple(Place(each.name, each.server, each.room) for each in devices)
        return Cluster(places, tuple(instances), {block: state.provision.block(block).nbytes for block in known}, pairs)
