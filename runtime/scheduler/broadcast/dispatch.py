"""The scheduler's part of dispatch among agents: name the devices that may take a hop, and record which did (BL-23).

    placed       the scheduler chooses the device of each hop (the paper: "a live record of block placements")
    broadcast    it chooses the device of the first hop only; each later hop is offered to devices that could take it,
                 and the first bid wins

    seat --pages on every candidate, OpenSequences to all of them--> agents … HopAssigned --> the path is the winner's,
    the pages of the other candidates are freed

Contract:
- A hop is offered only for a sequence without K and V (a new one without a cached prefix, or one that runs again), and
  until it is won: then the winner has its K and V.
- Candidates have the hop's blocks, its loaded stage, and room for the sequence now and later. They are nowhere else on
  its path, so that the number of hops stays the same whichever wins.
- Their pages are taken before the first row is sent, so no row waits for pages behind another.
- Until all hops are won, a sequence is neither migrated nor shared.
- Answers of an older epoch are dropped. A hop that was won by a device that could not have it (it has died) makes the
  sequence run again.
"""

from __future__ import annotations

import heapq

from runtime.chains import Hop
from runtime.kv.pages import groups_for
from runtime.messages import HopAssigned
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.lifecycle import SequenceLifecycle
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


class Candidates:
    """Choose the devices that may take the hops of a new sequence."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._most = state.config.broadcast_fanout if state.config.dispatch == "broadcast" else 1

    def hop_candidates(self, sequence: ScheduledSequence, route: Route) -> dict[int, tuple[str, ...]]:
        """Return the hops of a route with several candidates: the route's own device first, then the least busy."""
        if self._most < 2:
            return {}
        taken = set(route.devices)
        found: dict[int, tuple[str, ...]] = {}
        for at, hop in enumerate(route.path):
            if at == 0 or sum(each.device == hop.device for each in route.path) > 1:
                continue
            able = (
                each
                for each in self._holders(sequence, hop)
                if each.name not in taken and self._able(sequence, hop, each)
            )
            others = [
                each.name
                for each in heapq.nsmallest(
                    self._most - 1, able, key=lambda each: (each.passing.count, each.pages.used, each.name)
                )
            ]
            if others:
                taken.update(others)
                found[at] = hop.device, *others
        return found

    # -- internals -----------------------------------------------------------------------------------------------------

    def _holders(self, sequence: ScheduledSequence, hop: Hop) -> list[Device]:
        """Return living devices that have planned instances of all blocks of a hop, none about to be removed."""
        placed = self._state.block_map
        blocks = [use.block for use in sequence.chain.uses if hop.lo <= use.lo and use.hi <= hop.hi]
        names = placed.instances.get(blocks[0], ())
        found = [self._state.devices[name] for name in names if self._state.devices.alive(name)]
        return [
            each
            for each in found
            if each.plan.blocks.issuperset(blocks) and not any((b, each.name) in placed.leaving for b in blocks)
        ]

    def _able(self, sequence: ScheduledSequence, hop: Hop, device: Device) -> bool:
        """Return whether a device could take a hop now: its stage is loaded, and there is room.

        A missing stage is requested, for later sequences.
        """
        config, stage = self._state.config, sequence.chain.stage(hop.lo, hop.hi)
        if not device.stages.has(stage):
            self._state.ask_for(sequence.chain, device.name, stage)
            return False
        if (
            device.pages.assured < self._state.devices[hop.device].pages.assured
            or device.passing.expected >= config.max_num_seqs
        ):
            return False
        needs = groups_for(sequence.chain.spec, sequence.tokens) * (hop.layers[1] - hop.layers[0])
        slack = int(device.pages.capacity * config.watermark) if device.passing.count else 0
        return device.pages.free - slack >= needs


class BroadcastDispatch:
    """Process the outcomes of offered hops."""

    def __init__(self, state: ClusterState, seating: SequenceLifecycle) -> None:
        self._state = state
        self._seating = seating

    @property
    def settled(self) -> int:
        """Number of hops that were won."""
        return self._state.counters.hops_won

    def won(self, event: HopAssigned, now: int) -> None:
        """Record the winners of hops."""
        columns = zip(event.seqs, event.epochs, event.hops, event.starts, event.counts, event.devices, strict=True)
        for seq, epoch, at, start, count, device in columns:
            sequence = self._state.running.get(seq)
            if sequence is None or sequence.epoch != epoch or at not in sequence.offered.hops:
                continue
            candidates = sequence.offered.hops[at]
            hop = sequence.path[at]
            if device not in candidates or not self._state.devices[device].stages.has(
                sequence.chain.stage(hop.lo, hop.hi)
            ):
                self._seating.preempt(sequence, now)
                continue
            self._seating.settle(sequence, at, device)
            self._state.counters.hops_won += 1
            tell, request = self._state.tell, sequence.request
            if tell.on:
                tell.hop(now, request, start, count, at, sequence.path[at])
            tell.control(now, "dispatch.choose", "BL-23", device, seq=seq, rule="broadcast", hop=at, offered=candidates)

    def remove_device(self, device: str) -> None:
        """Remove a dead device from the candidates of offered hops."""
        for sequence in self._state.running.values():
            if device in sequence.offered.devices:
                self._seating.narrow(sequence, device)
