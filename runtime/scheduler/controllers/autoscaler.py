"""Add and remove instances by load (BL-24), and copy what is requested most (`policy.scaling.replicate`).

    saturated   a chain part and the sequences that wait for it fill more than `high` of a device's memory:
                `policy.scaling.autoscale` chooses a device for another instance, or an existing one with little load,
                and the sequences that move there
    asked       (placement by demand) a device has many more sequences than another one that has their blocks, or has
                room for them
    idle        an instance added this way had no sequence for `idle_ms`: it is removed

Contract: `look` is called once per interval. At most `_HOT` busy devices are examined, and at most `_SPOTS` are
candidates, so the cost does not grow with sequences. Its decisions become `actions`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from runtime.policy.migration.order import Mover
from runtime.policy.placement.locality import ClusterLayout, Instance, Policy
from runtime.policy.placement.locality import DeviceRoom as Place
from runtime.policy.scaling.autoscale import BlockDemand, ScalingLimits, scale
from runtime.policy.scaling.replicate import ByBytes, BySequences, Replica, ReplicaSpot, replicate
from runtime.scheduler.controllers.actions import Actions, Drain, MoveRequest, holders, runs
from runtime.scheduler.controllers.hotspots import ChainPart, Hotspots, parts_of, queues_of, stages_of
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.placement.traffic import TrafficCounter
from runtime.scheduler.state import ClusterState

_MS = 1_000_000
_NEVER = 1 << 62
#: Limits: busy devices that are examined at once, and candidates for new instances.
_HOT, _SPOTS = 16, 64


class Autoscaler:
    """Scale block instances. `asked`: copies are also made by demand, not only where memory is full."""

    def __init__(self, state: ClusterState, actions: Actions, traffic: TrafficCounter, asked: bool) -> None:
        config = state.config.control
        self._state = state
        self._actions = actions
        self._traffic = traffic
        self._asked = asked
        idle = config.idle_ms * _MS or _NEVER
        self._limits = ScalingLimits(config.high, config.low, idle, config.cooldown_ms * _MS)
        self._patience = config.migration_timeout_ms * _MS
        self._changed: dict[tuple[str, ...], int] = {}
        #: (blocks, device) of an added instance -> time in ns since which it has no sequence; None while it has one.
        self._grown: dict[tuple[tuple[str, ...], str], int | None] = {}

    def look(self, now: int) -> None:
        """Examine all loads and act on them. `now`: ns."""
        queues = queues_of(self._state)
        self._changed = {blocks: when for blocks, when in self._changed.items() if now - when < self._limits.calm}
        full = {device.name: self._full(device, queues) for device in self._state.devices if device.alive}
        hot = [name for name, part in full.items() if part > self._limits.high]
        for name in heapq.nlargest(_HOT, hot, key=full.__getitem__):
            self._saturated(self._state.devices[name], queues, full, now)
        if self._asked and self._state.config.routing == "least-bytes":
            self._relieve(queues, now)
        elif self._asked:
            self._copy(queues, now)
        self._idle(full, now)

    # -- scaling up ----------------------------------------------------------------------------------------------------

    def _full(self, device: Device, queues: Hotspots) -> float:
        """Return how full a device is, waiting sequences included: the larger share of its pages and of its places."""
        running = (device.passing.count + queues.sequences.get(device.name, 0.0)) / self._state.config.max_num_seqs
        return max(
            (device.pages.used_pages + queues.pages.get(device.name, 0.0)) / max(device.pages.capacity, 1), running
        )

    def _saturated(self, device: Device, queues: Hotspots, full: Mapping[str, float], now: int) -> None:
        """Move sequences of a full device's largest part to a calm instance, or add an instance for them."""
        part = next(iter(parts_of(device)), None)
        if part is None or part.blocks in self._changed:
            return
        # Existing instances, possibly from a longer part that includes these blocks.
        calm = [
            each
            for each in holders(self._state, part.blocks)
            if each is not device and full[each.name] < self._limits.low
        ]
        if calm and any(self._actions.wished(each.seq) for each in part.sequences):
            return  # their migrations are pending
        load = self._load(device, part, queues)
        cluster, room = self._cluster(device, part, full)
        loads = [load, *(BlockDemand(part.name, each.name, int(1000 * full[each.name]), 1000) for each in calm)]
        # With this many more pages they are as full as this device is then.
        room |= {
            each.name: min(
                each.pages.capacity - each.pages.used_pages,
                max(device.pages.used_pages - each.pages.used_pages, 0) // 2,
            )
            for each in calm
        }
        policy: Policy = "locality" if self._state.config.control.locality else "frag-min"
        decided = scale(loads, cluster, room, {}, self._limits, now, policy)
        for even in decided.evens:
            if even.moves:
                extra = {
                    "hot": device.name,
                    "part": round(even.part, 3),
                    "blocks": len(part.blocks),
                    "moves": len(even.moves),
                }
                self._state.tell.control(now, "scale.even", "BL-24", even.device, part.blocks[0], **extra)
                self._send(part, device.name, even.device, even.moves, "BL-24", now)
        for up in decided.ups:
            extra = {"hot": device.name, "part": round(up.part, 3), "blocks": len(part.blocks)}
            self._state.tell.control(now, "scale.up", "BL-24", up.device, part.blocks[0], **extra)
            self._grow(part, device.name, up.device, up.moves, "BL-24", now)
        if decided.refused:
            self._changed[part.blocks] = now
            self._state.tell.control(now, "scale.refused", "BL-24", device.name, part.blocks[0])

    def _grow(self, part: ChainPart, source: str, target: str, moves: Iterable[str], cause: str, now: int) -> None:
        self._changed[part.blocks] = now
        self._grown[part.blocks, target] = now
        self._actions.grow(part.blocks, target, cause, now)
        self._send(part, source, target, moves, cause, now)

    def _send(self, part: ChainPart, source: str, target: str, moves: Iterable[str], cause: str, now: int) -> None:
        for seq in moves:
            self._actions.move_request(
                MoveRequest(seq, frozenset(part.blocks), source, target, now + self._patience, cause)
            )

    def _load(self, device: Device, part: ChainPart, queues: Hotspots) -> BlockDemand:
        """Return the demand for a part on a device.

        `longest`: the number of sequences of the part that would fill the rest of the device's memory, or of its
        places.
        """
        here, own = len(part.sequences), max(part.pages / max(len(part.sequences), 1), 1.0)
        others = max(device.pages.used_pages - part.pages, 0)
        places = self._state.config.max_num_seqs - (device.passing.count - here)
        longest = max(min(int((device.pages.capacity - others) / own), places), 1)
        waiting = sum(
            count for chain, count in queues.chains.values() if any(use.block == part.blocks[0] for use in chain.uses)
        )
        instances = max(len(self._state.block_map.instances.get(part.blocks[0], ())), 1)
        return BlockDemand(
            part.name, device.name, here + -(-waiting // instances), longest, self._movers(part, device.name)
        )

    def _movers(self, part: ChainPart, device: str) -> tuple[Mover, ...]:
        """Return the sequences that could move, with their pages here, so that few shared ones are doubled (BL-18)."""
        able = (sequence for sequence in part.sequences if not sequence.waits.move and not sequence.waits.doomed)
        page_accounting = self._state.page_accounting
        return tuple(
            page_accounting.mover(each.seq, each.pages.holding, each.computed // each.spec.page_tokens, device)
            for each in able
        )

    def _cluster(self, hot: Device, part: ChainPart, full: Mapping[str, float]) -> tuple[ClusterLayout, dict[str, int]]:
        """Return the layout for `policy.placement.locality.place`, and free pages by candidate.

        It has the devices that are not busy, the part as one block, and the blocks next to it in its chains.
        """
        state, instances = self._state, self._state.block_map.instances
        calm = (state.devices[name] for name, share in full.items() if share < self._limits.low)
        offered = heapq.nsmallest(_SPOTS, calm, key=lambda each: (each.passing.count, -each.plan.room))
        held = {name for block in part.blocks for name in instances.get(block, ())}
        offered = [each for each in offered if each.name not in held]
        pairs: dict[tuple[str, str], float] = {}
        there = [Instance(part.name, hot.name)]
        nbytes = {part.name: sum(state.block_map.block(block).nbytes for block in part.blocks)}
        for (sender, receiver), rows in self._traffic.pairs.items():
            if sender == part.blocks[-1] or receiver == part.blocks[0]:
                other = receiver if sender == part.blocks[-1] else sender
                if not state.block_map.knows(other):
                    continue  # of a version that was removed since
                pairs[(part.name, other) if other == receiver else (other, part.name)] = rows
                if other not in nbytes:
                    nbytes[other] = state.block_map.block(other).nbytes
                    there += [Instance(other, name) for name in instances.get(other, ())[:_SPOTS]]
        free = {each.device: 0 for each in there} | {each.name: each.plan.room for each in offered}
        places = tuple(Place(name, state.devices[name].facts.server or name, room) for name, room in free.items())
        room = {each.name: each.pages.capacity - each.pages.used_pages for each in offered}
        return ClusterLayout(places, tuple(there), nbytes, pairs), room

    def _copy(self, queues: Hotspots, now: int) -> None:
        """Copy a part of devices with many more sequences than the rest, and move sequences to the copy."""
        state, margin = self._state, self._state.config.control.rebalance_margin
        loads = {
            each.name: each.passing.count + queues.sequences.get(each.name, 0.0) for each in state.devices if each.alive
        }
        idle = heapq.nsmallest(_SPOTS, loads, key=lambda name: (loads[name], name))
        for name in heapq.nlargest(_HOT, loads, key=lambda name: loads[name]):
            if loads[name] - loads[idle[0]] <= margin:
                return
            for part in stages_of(state.devices[name], queues):
                if any(loads[name] - loads[each.name] > margin for each in holders(state, part.blocks)):
                    continue  # new sequences go there, possibly to a recent copy
                measure = BySequences(loads[name], max(len(part.sequences), 1), margin)
                found = replicate(self._spots(part.blocks, idle, loads), measure)
                if found is not None:
                    moves = self._actions.order_moves(part.sequences, name)[: found.moves]
                    self._state.tell.control(
                        now, "scale.copy", "BL-24", found.device, part.blocks[0], hot=name, blocks=len(part.blocks)
                    )
                    self._grow(part, name, found.device, moves, "BL-24", now)
                    loads[found.device] += found.moves
                    loads[name] -= found.moves
                break

    def _relieve(self, queues: Hotspots, now: int) -> None:
        """Move sequences off devices with many sequences and large steps, if all steps then read fewer bytes."""
        state, used_paths = self._state, self._state.used_paths
        alive = {each.name: each for each in state.devices if each.alive}
        loads = {name: each.passing.count + queues.sequences.get(name, 0.0) for name, each in alive.items()}
        reads = {name: used_paths.reads.step_bytes(each) for name, each in alive.items()}
        idle = heapq.nsmallest(_SPOTS, alive, key=lambda name: (loads[name] * reads[name], name))
        taken: set[str] = set()
        for name in heapq.nlargest(_HOT, alive, key=lambda name: loads[name] * reads[name]):
            if name in taken or loads[name] < 2:
                continue
            found: list[tuple[Replica, ChainPart]] = []
            for part in stages_of(alive[name], queues):
                if part.sequences and not any(self._actions.wished(each.seq) for each in part.sequences):
                    spots = self._offers(
                        part, [each for each in idle if each != name and each not in taken], loads, reads
                    )
                    relief = replicate(spots, self._measure(part, alive[name], loads[name], reads[name]))
                    if relief is not None:
                        found.append((relief, part))
            if found:
                relief, part = max(found, key=lambda each: (each[0].gain, each[1].blocks))
                self._relieved(name, part, relief, now)
                taken.update((name, relief.device))

    def _relieved(self, name: str, part: ChainPart, relief: Replica, now: int) -> None:
        """Move some of a part's sequences to a device that has its blocks, or to a new copy."""
        moves = self._actions.order_moves(part.sequences, name)[: relief.moves]
        copied = not self._state.devices[relief.device].plan.blocks.issuperset(part.blocks)
        extra = {"hot": name, "blocks": len(part.blocks), "gain": round(relief.gain, 3), "moves": len(moves)}
        self._state.tell.control(
            now, "scale.copy" if copied else "scale.even", "BL-24", relief.device, part.blocks[0], **extra
        )
        if copied:
            self._grow(part, name, relief.device, moves, "BL-24", now)
        else:
            self._send(part, name, relief.device, moves, "BL-24", now)

    def _measure(self, part: ChainPart, device: Device, load: float, reads: int) -> ByBytes:
        """Return a part's measure by bytes read.

        Weights that other sequences of the device use are not counted: they are read in any case.
        """
        others = {id(sequence) for sequence in part.sequences}
        used = {
            use.block
            for sequence in device.passing.here.values()
            if id(sequence) not in others
            for use in sequence.chain.uses
        }
        alone = sum(self._state.block_map.block(block).nbytes for block in part.blocks if block not in used)
        pages = sum(
            sequence.pages.groups * dict(sequence.place.weights).get(device.name, 0) for sequence in part.sequences
        )
        return ByBytes(load, reads, len(part.sequences), pages * device.pages.page_bytes / len(part.sequences), alone)

    def _offers(
        self, part: ChainPart, names: Iterable[str], loads: Mapping[str, float], reads: Mapping[str, int]
    ) -> list[ReplicaSpot]:
        """Return other devices with the bytes that their steps read.

        Left out are devices without all of the blocks if the part was copied lately, and devices with all of them if
        one drains.
        """
        placed, used_paths, offers = self._state.block_map, self._state.used_paths, []
        for name in names:
            device = self._state.devices[name]
            more = sum(placed.block(block).nbytes for block in part.blocks if block not in device.plan.blocks)
            adds = sum(placed.block(block).nbytes for block in part.blocks if not used_paths.reads.uses(name, block))
            if part.blocks in self._changed if more else any((block, name) in placed.leaving for block in part.blocks):
                continue
            offers.append(ReplicaSpot(name, loads[name], device.plan.room, more, reads[name], adds))
        return offers

    def _spots(self, blocks: Sequence[str], names: Iterable[str], loads: dict[str, float]) -> list[ReplicaSpot]:
        """Return the devices that lack some of these blocks."""
        state = self._state
        spots: list[ReplicaSpot] = []
        for name in names:
            device = state.devices[name]
            more = sum(state.block_map.block(block).nbytes for block in blocks if block not in device.plan.blocks)
            if more:
                spots.append(ReplicaSpot(name, loads[name], device.plan.room, more))
        return spots

    # -- scaling down --------------------------------------------------------------------------------------------------

    def _idle(self, full: Mapping[str, float], now: int) -> None:
        """Remove instances added by load that had no sequence for `idle_ms`, if the remaining ones are calm."""
        for (blocks, name), since in tuple(self._grown.items()):
            device = self._state.devices[name]
            if not device.plan.blocks.issuperset(blocks):
                del self._grown[blocks, name]
            elif not device.alive:
                self._grown[blocks, name] = None  # it will return with its planned blocks
            elif device.stages.brings(blocks):
                self._grown[blocks, name] = None  # its stage is still loading
            elif any(next(runs(sequence, name, blocks), None) for sequence in device.passing.here.values()):
                self._grown[blocks, name] = None
            elif since is None:
                self._grown[blocks, name] = now
            elif now - since >= self._limits.idle:
                self._shrink(blocks, name, since, full, now)

    def _shrink(self, blocks: tuple[str, ...], name: str, since: int, full: Mapping[str, float], now: int) -> None:
        kind = " ".join(blocks)
        # Block by block: one device need not hold all that this instance holds.
        holds = [[each.name for each in holders(self._state, (block,)) if each.name != name] for block in blocks]
        others = sorted({other for found in holds for other in found})
        if not all(holds) or max(full[each] for each in others) >= self._limits.low:
            return
        loads = [BlockDemand(kind, each, int(1000 * full[each]), 1000) for each in others]
        decided = scale(
            [BlockDemand(kind, name, 0, 1, (), since), *loads], ClusterLayout((), (), {}, {}), {}, {}, self._limits, now
        )
        for down in decided.downs:
            if down.device == name:
                self._grown[blocks, name] = now  # examined again if the drain fails
                if self._actions.drain(Drain(frozenset(blocks), name, None, now + self._patience, "BL-24")) is None:
                    self._changed[blocks] = now
                    self._state.tell.control(now, "scale.down", "BL-24", name, blocks[0], blocks=len(blocks))
