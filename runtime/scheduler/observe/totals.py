"""Add up the state of all devices of a cluster, in the form of one agent's state. Reads only."""

from __future__ import annotations

from dataclasses import replace

from runtime.control.counters import AgentState, block_loads, model_loads
from runtime.scheduler.migration.migration import MigrationCounts
from runtime.scheduler.residency.waiters import SwapCounts
from runtime.scheduler.state import ClusterState
from runtime.types import PageCounts


def state_of(state: ClusterState, moved: MigrationCounts, swapped: SwapCounts) -> AgentState:
    """Return the state of all devices together. `moved`, `swapped`: totals of migrations, and of stages loaded."""
    specs = tuple(chain.spec for chain in state.chains.values())
    models = model_loads(specs, (m.spec.name for m in state.running.values()), (m.spec.name for m in state.waiting))
    instances = block_loads(specs, models, state.config.max_num_seqs)
    alive = [device for device in state.devices if device.alive]
    capacity, used = sum(device.pages.capacity for device in alive), sum(device.pages.used for device in alive)
    pages = PageCounts(capacity, capacity - used, used)
    counters = replace(
        state.counters.snapshot(),
        moves=moved.committed,
        moves_aborted=moved.aborted,
        copied=moved.copied,
        recomputed=moved.recomputed,
        moved_bytes=moved.nbytes,
        stage_loads=swapped.loads,
        stage_unloads=swapped.unloads,
        loaded_bytes=swapped.loaded_bytes,
        load_ns=swapped.load_ns,
    )
    return AgentState(len(state.running), len(state.waiting), pages, models, instances, counters)
