"""Load the stages that waiting sequences need, and unload others where a device cannot hold all of its models at once.

    request_stages(sequence, missing)    where they do not fit, make room first, or wait
    is_closed(sequence)                  whether it waits because a stage of its chain is about to leave
    in_the_way(sequence, missing)        what running sequences would have to leave for them
    holds_back(sequence, devices)        whether a sequence takes no pages: an earlier one waits for their memory
    make_pages(needs)                    let idle stages leave for pages
    retry_waiting()                      retry what waits for its turn

Planned instances say where a block may run (`placement.block_map`); this class says what is loaded there now. It is
used where `ClusterConfig.residency` is `swap`.

Contract:
- The blocks of loaded and loading stages, each counted once, never exceed the limit of a device. Where pages share
  their budget (`DevicePages.budget`), both together never exceed that.
- A stage with sequences on it is never unloaded, nor one that an earlier waiting sequence needs.
- A sequence whose stages do not fit beside stages in use waits `swap_patience_ms`, or `_PATIENCE` times the expected
  load if that is longer; so do all of its chain together, whichever is the first. Then stages in use are closed,
  furthest next use first: they take no new sequences, and leave when those on them have ended. Meanwhile no later
  sequence loads anything on that device, so none starves.
- Where a cell has one model at a time (`OrderConfig.exclusive`), stages of other models do not fit beside it at all,
  and leave all devices of the cell before any of its stages is loaded.
- Where models take turns (`OrderConfig.turn_ms`), stages that have had theirs are closed, and what runs on them gives
  way. Then the model with the oldest turn comes first.
- Where groups run in a planned order, the first one does not wait: that it is the first is the plan's decision, and the
  run floor keeps models from taking turns too often.

Of a shared budget:
- A load gets, in this order, free pages, pages of cached prefixes, and the memory of stages that leave. It takes no
  page of a running sequence, and leaves as many as they have for them to grow, unless its sequence has waited long
  enough. Where running sequences are in its way even so, later ones take no pages on that device until it fits.
- Pages get the memory of stages that no running or waiting sequence needs, once these have been idle for as long as a
  sequence would wait to load them again: by then keeping them has cost as much as their next load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from runtime.chains import Chain, Stage
from runtime.policy.residency.eviction import StageWeights, footprint_of, stages_to_unload
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.kv.prefix_cache import PrefixCache
from runtime.scheduler.migration.migration import Moves
from runtime.scheduler.residency.demand_loads import DemandLoads
from runtime.scheduler.residency.drains import Drains
from runtime.scheduler.residency.idle_stages import IdleStages
from runtime.scheduler.residency.room import across_cell, incoming_weights, room_beside_pages, room_for_weights
from runtime.scheduler.residency.waiters import InTheWay, OnDevice, RoomWaiter
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: A sequence waits at least so many times the expected duration of its load before stages in use are closed for it.
_PATIENCE = 2
_MS = 1_000_000


class Residency:
    """What is loaded on the devices, by demand."""

    def __init__(self, state: ClusterState, prefix_cache: PrefixCache, moves: Moves) -> None:
        self._state = state
        self._prefix_cache = prefix_cache
        self._moves = moves
        self.on = state.config.residency == "swap"
        self._alone = self.on and state.config.order.excludes
        self._waiters: dict[str, RoomWaiter] = {}
        self._places: dict[str, int] | None = None
        self._used: dict[tuple[str, Stage], int] = {}
        self._idle, self._loads = IdleStages(), DemandLoads()
        self._drains = Drains(state, self._loads)
        self._turns = state.waiting.turns
        self._resting = False  # whether pages wait for a stage that has not been idle for long enough
        self.counts = self._loads.counts

    # -- what admission calls ------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begin a pass over all waiting sequences: their order may have changed, and waiters may have gone."""
        self._places = None
        for name, waiter in tuple(self._waiters.items()):
            if waiter.sequence.path or waiter.sequence.seq not in self._state.sequences:
                del self._waiters[name]

    def is_closed(self, sequence: ScheduledSequence, now: int) -> bool:
        """Return whether a stage of a sequence's chain is about to leave its device, before the sequence would end.

        In a strict order, and where models are alone, not for a later sequence: that one waits behind this one, which
        would wait for it in turn.
        """
        strict = self._alone or self._state.config.order.holds_all
        waiters = {
            name: each
            for name, each in self._waiters.items()
            if each.closed and (not strict or self._is_before(each, sequence))
        }
        return bool(waiters) and self._drains.keeps_out(sequence, waiters, now)

    def holds_back(self, sequence: ScheduledSequence, devices: Iterable[str]) -> bool:
        """Return whether an earlier sequence has waited long for memory that pages have on one of these devices."""
        waiters = (self._waiters.get(name) for name in devices) if self._waiters else ()
        return any(each is not None and each.holds and self._is_before(each, sequence) for each in waiters)

    def make_pages(self, needs: Mapping[str, int], now: int) -> bool:
        """Unload idle stages so that so many pages, by device, are free or a cached prefix's; return whether any left.

        None leaves where that would not be enough.
        """
        gone: dict[str, list[Stage]] = {}
        for name, pages in needs.items():
            device = self._state.devices[name]
            wanted = device.pages.used_pages + pages
            if not device.pages.budget or wanted <= device.pages.capacity:
                continue
            resident = self._resident(device)
            able = [
                each if self._rested(device, each, resident, now) else replace(each, pinned=True) for each in resident
            ]
            limit, order = device.pages.weights_beside(wanted), self._state.config.eviction
            stages = stages_to_unload(able, StageWeights({}), limit, order)
            if stages is None:
                self._resting |= any(not each.pinned and each.next_use is None for each in resident)
                return False
            gone[name] = [each.stage for each in stages if each.stage is not None]
        for name, leaving in gone.items():
            self._unload(self._state.devices[name], leaving, now)
        return bool(gone)

    def request_stages(self, sequence: ScheduledSequence, missing: Sequence[tuple[str, Stage]], now: int) -> None:
        """Request the stages that a sequence lacks, after making room for them; where that is impossible, it waits."""
        chain = sequence.chain
        cleared = [self._gets_room(sequence, *each, now) for each in across_cell(self._state, sequence, missing)]
        if not all(cleared):
            return
        for name, stage in missing:
            stages = self._state.devices[name].stages
            if not self.on:
                self._state.ask_for(chain, name, stage)
                continue
            if stage in stages.loading or stage in stages.refused:
                continue
            if self._gets_room(sequence, name, stage, now):
                missed = self._missing(chain, name, stage)
                if self._state.ask_for(chain, name, stage):
                    self._loads.begin(name, stage, missed, now)

    def in_the_way(self, sequence: ScheduledSequence, missing: Sequence[tuple[str, Stage]]) -> InTheWay | None:
        """Return what running sequences would have to leave for the stages that a sequence lacks; None for nothing.

        That is so where it is the first that waits on those devices.
        """
        found: dict[str, frozenset[Stage]] = {}
        longest = 0
        for name, stage in across_cell(self._state, sequence, missing) or missing:
            waiter, device = self._waiters.get(name), self._state.devices[name]
            if waiter is None or waiter.sequence is not sequence:
                continue
            incoming, resident = incoming_weights(self._state, sequence, stage), self._resident(device)
            gone = {each.stage for each in self._leaving(sequence, device, resident, incoming) or ()}
            if self._alone or self._turns.on:
                gone &= waiter.closed  # not yet while the run floor or the turn holds
            used = frozenset(stage for stage in self._in_use(device) if stage in gone)
            if used:
                found[name] = used
                kept = {block for each in resident if each.stage not in gone for block in each.weights.blocks}
                missed = {block: size for block, size in incoming.blocks.items() if block not in kept}
                longest = max(longest, int(1e9 * self._state.times.loads.seconds(name, missed, incoming.own)))
        return InTheWay(found, longest) if found else None

    def close(self, stages: Mapping[str, Iterable[Stage]], now: int) -> None:
        """Let no new sequences on stages that leave for the first waiting sequence of their devices."""
        for name, some in stages.items():
            if name in self._waiters:
                closed = self._waiters[name].closed
                self._drains.begin(name, set(some) - closed, now)
                closed.update(some)

    def is_on_way(self, sequence: ScheduledSequence, device: str, stage: Stage) -> bool:
        """Return whether a request of a stage changes nothing: it is loading, or an earlier sequence waits there."""
        waiter = self._waiters.get(device)
        earlier = waiter is not None and self._is_before(waiter, sequence)
        return earlier or stage in self._state.devices[device].stages.loading

    def record_use(self, sequence: ScheduledSequence, now: int) -> None:
        """Record that a sequence begins to run on the stages of its path."""
        for hop in sequence.path:
            stage = sequence.chain.stage(hop.lo, hop.hi)
            self._used[hop.device, stage] = now
            self._idle.end(hop.device, stage)

    # -- events --------------------------------------------------------------------------------------------------------

    def record_load(self, device: str, stage: Stage, now: int) -> None:
        """Record that a requested stage is loaded."""
        self._turns.begin(stage.model, (chain.loaded_as for chain in self._state.in_use()), now)
        if self._loads.end(device, stage, now):
            self._used[device, stage] = now

    def remove_device(self, device: str) -> None:
        """Forget a device that has died."""
        self._waiters.pop(device, None)
        self._idle.remove_device(device)
        self._drains.remove_device(device)
        self._loads.remove_device(device)

    def retry_waiting(self, now: int) -> None:
        """Let admission run again while a sequence waits for room. Called on every tick."""
        if self._waiters or self._resting:
            self._state.changed = True
        self._resting = False
        for device in self._state.devices.living.values():
            if device.pages.budget:
                self._idle.note(device, self._in_use(device), now)

    # -- internals -----------------------------------------------------------------------------------------------------

    def _gets_room(self, sequence: ScheduledSequence, name: str, stage: Stage | None, now: int) -> bool:
        """Make room for a stage, or for none, unless an earlier sequence waits for room there."""
        waiter = self._waiters.get(name)
        if (waiter is not None and self._is_before(waiter, sequence)) or not self._make_room(
            sequence, name, stage, now
        ):
            return False
        if waiter is not None and waiter.sequence is sequence:
            del self._waiters[name]
        return True

    def _make_room(self, sequence: ScheduledSequence, name: str, stage: Stage | None, now: int) -> bool:
        """Unload stages until one fits; return False, with nothing unloaded, if too few can leave now."""
        state, device = self._state, self._state.devices[name]
        if not device.plan.limit and not self._alone:
            return True
        incoming = incoming_weights(self._state, sequence, stage)
        resident, place = self._resident(device), self._place_of(sequence)
        overdue = self._overdue(sequence, device, resident, incoming, now)
        limit = room_beside_pages(state, sequence, device, stage, grown=not overdue)
        gone = stages_to_unload(resident, incoming, limit, state.config.eviction, place)
        if gone is None:
            self._wait(sequence, device, resident, incoming, now)
            return False
        if gone and self._in_run(sequence, device, gone, incoming, now):
            self._resting = True
            return False
        if gone:
            coming = () if stage is None else (stage,)
            self._unload(device, [each.stage for each in gone if each.stage is not None], now, coming)
        while stage is not None and not state.fits(sequence.chain, name, stage) and self._prefix_cache.give_way(name):
            pass
        return True

    def _in_run(
        self, sequence: ScheduledSequence, device: Device, gone: Sequence[OnDevice], incoming: StageWeights, now: int
    ) -> bool:
        """Return whether a stage that would leave has work, and has not served for long enough since its load.

        Without this, models that take turns would load for longer than they serve. What would be late by waiting does
        not wait.
        """
        order, floor = self._state.order, self._state.config.order.floor
        if order is None or not (floor or self._turns.on):
            return False
        loads = [
            self._loads.latest(device.name, each.stage)
            for each in gone
            if each.next_use is not None or each.stage in self._in_use(device)
        ]
        if self._turns.on:
            return now < self._turns.end(loads, floor)
        wait = max((since + floor * took for since, took in loads), default=0.0) - now
        expected = self._loads.expected(incoming.own + sum(incoming.blocks.values()))
        return wait > 0 and now + wait + expected + order.longest(sequence) <= sequence.rank.order

    def _rested(self, device: Device, each: OnDevice, resident: Sequence[OnDevice], now: int) -> bool:
        """Return whether a stage has been idle for long enough to leave for pages."""
        if each.pinned or each.next_use is not None or each.stage is None:
            return False
        since = self._idle.since(device.name, each.stage)
        rest = footprint_of(other.weights for other in resident if other is not each)
        return since is not None and now - since >= self._patience(rest.missing(each.weights))

    def _patience(self, nbytes: int) -> float:
        """Return how long, in ns, a sequence waits for a load of so many bytes before stages in use leave for it."""
        return max(self._state.config.swap_patience_ms * _MS, _PATIENCE * self._loads.expected(nbytes))

    def _overdue(
        self,
        sequence: ScheduledSequence,
        device: Device,
        resident: Sequence[OnDevice],
        incoming: StageWeights,
        now: int,
    ) -> bool:
        """Return whether a sequence waits for room on a device, and has done so for long enough."""
        waiter = self._waiters.get(device.name)
        if waiter is None or waiter.sequence is not sequence:
            return False
        missing = footprint_of(each.weights for each in resident).missing(incoming)
        at_once = self._alone or self._turns.on or bool(self._state.config.order.floor)
        return at_once or now - waiter.since >= self._patience(missing)

    def _wait(
        self,
        sequence: ScheduledSequence,
        device: Device,
        resident: Sequence[OnDevice],
        incoming: StageWeights,
        now: int,
    ) -> None:
        """Let a sequence wait for room; close stages in use once it has waited long enough."""
        waiter = self._waiters.get(device.name)
        if waiter is not None and waiter.sequence.chain is sequence.chain:
            waiter.sequence = sequence  # the first of its chain has changed
        elif waiter is None or waiter.sequence is not sequence:
            waiter = self._waiters[device.name] = RoomWaiter(sequence, now)
            self._state.tell.control(now, "stage.wait", "QL-13", device.name, seq=sequence.seq)
        if not self._overdue(sequence, device, resident, incoming, now):
            return
        order, place, limit = (
            self._state.config.eviction,
            self._place_of(sequence),
            room_for_weights(self._state, sequence, device, incoming),
        )
        if device.pages.budget and stages_to_unload(resident, incoming, limit, order, place) is not None:
            waiter.holds = True  # pages are in the way
            return
        gone = self._leaving(sequence, device, resident, incoming)
        if gone and self._in_run(sequence, device, gone, incoming, now):
            return
        fresh = {each.stage for each in gone or () if each.stage is not None} - waiter.closed
        for stage in sorted(fresh):
            self._state.tell.control(now, "stage.close", "QL-13", device.name, stage=stage.id, seq=sequence.seq)
        self._drains.begin(device.name, fresh, now)
        waiter.closed |= fresh

    def _leaving(
        self, sequence: ScheduledSequence, device: Device, resident: Sequence[OnDevice], incoming: StageWeights
    ) -> list[OnDevice] | None:
        """Return the stages that leave for a sequence's once no running one uses them; None if too few may."""
        able = [each if each.stage in device.stages.loading else replace(each, pinned=False) for each in resident]
        limit = room_for_weights(self._state, sequence, device, incoming)
        return stages_to_unload(able, incoming, limit, self._state.config.eviction, self._place_of(sequence))

    def _resident(self, device: Device) -> list[OnDevice]:
        """Return the loaded and loading stages of a device."""
        busy = self._in_use(device)
        found: list[OnDevice] = []
        for stage in sorted({*device.stages.loaded, *device.stages.loading}):
            loading = stage in device.stages.loading
            blocks = device.stages.wanted.get(stage, ())
            moving = self._moves.bound_for(device.name, blocks)
            found.append(
                OnDevice(
                    stage.id,
                    StageWeights(self._state.sizes_of(blocks), device.stages.own_bytes.get(stage, 0)),
                    self._next_use(stage),
                    self._used.get((device.name, stage), 0),
                    loading or moving or stage in busy or stage not in device.stages.wanted,
                    stage,
                )
            )
        return found

    def _in_use(self, device: Device) -> set[Stage]:
        """Return the stages of a device that running sequences use, or may use if an offered hop goes there."""
        asked = (self._state.running[seq] for seq in device.passing.asked)
        users = [*device.passing.here.values(), *asked]
        return {sequence.chain.stage(hop.lo, hop.hi) for sequence in users for hop in sequence.path}

    def _next_use(self, stage: Stage) -> int | None:
        """Return the place of a stage's first waiting sequence in rank order; None if none waits or it is closed."""
        if any(stage in each.closed for each in self._waiters.values()):
            return None
        return self._order().get(stage.model)

    def _is_before(self, waiter: RoomWaiter, sequence: ScheduledSequence) -> bool:
        rank = self._state.waiting.rank
        return rank(waiter.sequence) < rank(sequence)

    def _place_of(self, sequence: ScheduledSequence) -> int:
        return self._order().get(sequence.chain.loaded_as, 0)

    def _order(self) -> dict[str, int]:
        """Return the place of each chain's first waiting sequence in rank order, by `Chain.loaded_as`."""
        if self._places is None:
            self._places = {}
            for place, sequence in enumerate(self._state.waiting.heads()):
                self._places.setdefault(sequence.chain.loaded_as, place)
        return self._places

    def _missing(self, chain: Chain, name: str, stage: Stage) -> int:
        device = self._state.devices[name]
        there = footprint_of(each.weights for each in self._resident(device))
        return there.missing(self._state.weights_of(chain, stage))

    def _unload(self, device: Device, stages: Sequence[Stage], now: int, coming: tuple[Stage, ...] = ()) -> None:
        """Unload stages that no sequence uses, with the cached prefixes of their chains, to make room for `coming`."""
        if len(self._prefix_cache):
            models = {stage.model for stage in stages}
            for chain in (*self._state.in_use(), *self._state.leaving.values()):
                if chain.loaded_as in models:
                    self._prefix_cache.remove_version(chain.version)
        device.stages.drop_stages(stages)
        self._state.unload(device.name, stages, coming)
        self._drains.end(device.name, stages)
        for stage in stages:
            self._used.pop((device.name, stage), None)
            self._loads.drop_stage(device.name, stage)
            self._idle.end(device.name, stage)
            self._state.tell.control(now, "stage.unload", "QL-13", device.name, stage=stage.id)
        self.counts.unloads += len(stages)
        for waiter in self._waiters.values():
            waiter.closed.difference_update(stages)
