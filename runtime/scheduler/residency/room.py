"""How much room a sequence finds for its stages on a device, and where else stages have to leave for them."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.chains import Stage
from runtime.kv.pages import groups_for
from runtime.policy.residency.eviction import StageWeights
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: A stage on a device; None: no stage of the chain is missing there.
Missing = tuple[str, Stage | None]


def incoming_weights(state: ClusterState, sequence: ScheduledSequence, stage: Stage | None) -> StageWeights:
    """Return the bytes of a stage that a sequence needs."""
    return StageWeights({}) if stage is None else state.weights_of(sequence.chain, stage)


def room_for_weights(state: ClusterState, sequence: ScheduledSequence, device: Device, incoming: StageWeights) -> int:
    """Return the bytes of weights that a device may hold once it has the incoming ones of a sequence's chain."""
    return state.limit_with(sequence.chain.loaded_as, device.name, incoming)


def room_beside_pages(
    state: ClusterState, sequence: ScheduledSequence, device: Device, stage: Stage | None, grown: bool
) -> int:
    """Return the same beside the pages in use and those that a sequence needs.

    `grown`: beside twice the pages that running sequences have now, as far as these may grow.
    """
    pages = device.pages
    limit = room_for_weights(state, sequence, device, incoming_weights(state, sequence, stage))
    if not pages.budget or stage is None:
        return limit
    uses = sequence.chain.uses
    layers = sum(use.kv_layers for use in uses if stage.lo <= use.lo and use.hi <= stage.hi)
    needed = pages.used_pages + groups_for(sequence.chain.spec, sequence.tokens + 1) * layers
    for running in device.passing.here.values() if grown else ():
        longest = groups_for(running.spec, len(running.request.prompt) + running.place.most)
        more = max(min(longest - running.pages.groups, running.pages.groups), 0)
        needed += more * dict(running.place.weights).get(device.name, 0)
    return min(limit, pages.weights_beside(needed))


def across_cell(
    state: ClusterState, sequence: ScheduledSequence, missing: Sequence[tuple[str, Stage]]
) -> list[Missing]:
    """Return all devices of a sequence's cell, with the stages missing there; none where models may be there together.

    Where a cell has one model at a time, the stages of other ones leave all of its devices before any is loaded.
    """
    if not state.config.order.excludes:
        return []
    cells = state.cells
    within = (
        frozenset[str]()
        if cells is None
        else cells.devices_of(sequence) or frozenset(each.name for each in state.devices)
    )
    stages = dict(missing)
    return [(name, stages.get(name)) for name in sorted(within | stages.keys())]
