"""Carry out actions that take time: add instances, move running sequences, remove instances.

    grow(blocks, device)          add an instance; new sequences may use it at once, its stages are loaded when they are
                                  first needed
    move_request(request)         move a running sequence's blocks: retried until they run there, or the time is over
    drain(drain)                  remove an instance: no new sequences, those on it move away; then its stages are
                                  unloaded

Contract:
- `advance` is called on every tick.
- An instance is removed only after its sequences have left, and never the last living one of a block.
- Other blocks of a chain stay where they are. The only decision made here is the target of sequences that leave: the
  device with the fewest sequences among those with the same blocks.
- Every action ends. A drain that is impossible now is refused at once, with the reason, before any sequence moves for
  it. An accepted one ends with `instance.drop`, or with `instance.keep` and the reason.
- Sequences have until `until` to leave. Then only what is under way to the instance itself is waited for: a stage that
  is loading, a migration of its blocks.
- The latest action wins: an instance that is requested while it drains stays. No sequence is moved to an instance that
  is gone or drains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from runtime.chains import Chain
from runtime.policy.migration.order import Mover, order_moves
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.kv.prefix_cache import PrefixCache
from runtime.scheduler.migration.migrations import Migrations
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Move requests that one tick processes at most.
_ASKED = 64
#: Limit of candidate devices for a migration; more cost time and gain little.
_FEW = 16
#: Why an instance cannot be removed.
LAST, SHORTENS = "it has become the last one that lives", "answers could not become as long without it"


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """A request to move blocks of a running sequence.

    Fields:
        blocks: Those of them that run on `source` are moved.
        until: Time in ns after which the request lapses.
        cause: ID of the mechanism that makes the request, for the trace.
        copy, recompute, hold: As in `Migrations.start`.
    """

    seq: str
    blocks: frozenset[str]
    source: str
    target: str
    until: int
    cause: str
    copy: bool = True
    recompute: bool = True
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """The removal of an instance of each of these blocks from a device.

    Fields:
        target: Where its sequences go; None for the least busy device.
        until: Time in ns by which sequences must have left.
        cause: ID of the mechanism that makes the request, for the trace.
    """

    blocks: frozenset[str]
    source: str
    target: str | None
    until: int
    cause: str


@dataclass(slots=True)
class ActionCounts:
    """Totals of actions.

    Fields:
        grown: Instances added.
        dropped: Instances removed.
        kept: Instances that could not be removed.
        moved: Migrations started.
        lapsed: Move requests given up.
    """

    grown: int = 0
    dropped: int = 0
    kept: int = 0
    moved: int = 0
    lapsed: int = 0


class Actions:
    """Pending move requests and drains, and totals."""

    def __init__(self, state: ClusterState, migrations: Migrations, prefix_cache: PrefixCache) -> None:
        self._state = state
        self._migrations = migrations
        self._prefix_cache = prefix_cache
        self._move_requests: deque[MoveRequest] = deque()
        self._wished: set[str] = set()
        self._drains: list[Drain] = []
        self.counts = ActionCounts()

    def __len__(self) -> int:
        return len(self._move_requests) + len(self._drains)

    # -- requests ------------------------------------------------------------------------------------------------------

    def grow(self, blocks: Collection[str], device: str, cause: str, now: int) -> None:
        """Add an instance of each of these blocks; one that drains stays instead."""
        state = self._state
        for drain in [each for each in self._drains if each.source == device and not each.blocks.isdisjoint(blocks)]:
            self._recall(drain, drain.blocks.intersection(blocks), now)
        for block in blocks:
            if device not in state.block_map.instances.get(block, ()):
                state.block_map.add(block, device)
                self.counts.grown += 1
                state.tell.control(now, "instance.add", cause, device, block)
        state.changed = True

    def withdraw(self, blocks: Collection[str], device: str, cause: str, now: int) -> None:
        """Remove instances that `grow` has added, before anything was loaded for them."""
        for block in blocks:
            self._state.block_map.remove(block, device)
            self.counts.dropped += 1
            self._state.tell.control(now, "instance.drop", cause, device, block)

    def order_moves(self, sequences: Iterable[ScheduledSequence], device: str) -> list[str]:
        """Return which sequences leave a device first, so that few shared pages exist twice (BL-18).

        Leaves out those that cannot move: they are in a migration, or about to be preempted.
        """
        accounting = self._state.page_accounting
        able, unable = list[Mover](), list[Mover]()
        for each in sequences:
            groups = each.computed // each.spec.page_tokens
            mover = accounting.mover(each.seq, each.pages.holding, groups, device, each.waits.paused or 0)
            (unable if each.waits.move or each.waits.doomed else able).append(mover)
        cached = (accounting.mover(each.name, each.holding, each.known, device) for each in self._prefix_cache)
        return [one.mover.seq for one in order_moves(able, (*unable, *cached))]

    def move_request(self, move_request: MoveRequest) -> None:
        """Add a move request; ignored if the sequence has one already."""
        if move_request.seq not in self._wished:
            self._wished.add(move_request.seq)
            self._move_requests.append(move_request)

    def wished(self, seq: str) -> bool:
        """Return whether a sequence has a pending move request."""
        return seq in self._wished

    def drain(self, drain: Drain) -> str | None:
        """Begin to remove instances; return why that is impossible, with nothing changed, or None."""
        if any(each.source == drain.source and each.blocks & drain.blocks for each in self._drains):
            return "it is about to go already"
        if not self._state.devices[drain.source].plan.blocks.issuperset(drain.blocks):
            return "it is not there"
        if (why := self._needed(drain)) is not None:
            return why
        self._drains.append(drain)
        self._state.block_map.leaving.update((block, drain.source) for block in drain.blocks)
        return None

    # -- progress ------------------------------------------------------------------------------------------------------

    def advance(self, now: int) -> None:
        """Continue all pending actions. Called once per tick."""
        for _ in range(min(len(self._move_requests), _ASKED)):
            move_request = self._move_requests.popleft()
            if self._pending(move_request, now):
                self._move_requests.append(move_request)
            else:
                self._wished.discard(move_request.seq)
        self._drains = [drain for drain in self._drains if self._draining(drain, now)]

    def _pending(self, move_request: MoveRequest, now: int) -> bool:
        """Try to start a requested migration; return whether the request stays."""
        devices = self._state.devices
        sequence = self._state.running.get(move_request.seq)
        if (
            sequence is None
            or move_request.source not in sequence.place.devices
            or not devices.alive(move_request.target)
        ):
            return False
        if now > move_request.until:
            self.counts.lapsed += 1
            return False
        part = next(runs(sequence, move_request.source, move_request.blocks), None)
        if part is None:
            return False
        if not self._stays(move_request.target, sequence.chain, part):
            self.counts.lapsed += 1
            return False
        if not sequence.waits.move and len(self._migrations) < self._state.config.control.max_migrations:
            self._start(sequence, part, move_request.target, move_request.cause, now, move_request)
        return True

    def _start(
        self,
        sequence: ScheduledSequence,
        part: range,
        target: str,
        cause: str,
        now: int,
        move_request: MoveRequest | None = None,
    ) -> None:
        how = (
            {}
            if move_request is None
            else {"copy": move_request.copy, "recompute": move_request.recompute, "hold": move_request.hold}
        )
        if self._migrations.start(sequence, part, target, now, **how) is None:
            self.counts.moved += 1
            self._state.tell.control(
                now, "sequence.move", cause, target, sequence.chain.uses[part.start].block, seq=sequence.seq
            )

    def _draining(self, drain: Drain, now: int) -> bool:
        """Continue a drain; return whether it stays."""
        state, device = self._state, self._state.devices[drain.source]
        if not all(state.block_map.spare(block, drain.source) for block in drain.blocks):
            return self._cancel_drain(drain, LAST, now)
        if device.alive:
            here = (
                (sequence, next(runs(sequence, drain.source, drain.blocks), None))
                for sequence in device.passing.here.values()
            )
            staying = [(sequence, part) for sequence, part in here if part]
            if staying and now > drain.until:
                return self._cancel_drain(drain, f"{len(staying)} sequences could not leave in time", now)
            for sequence, part in staying:
                self._send_on(sequence, part, drain, now)
            if staying or self._awaited(device, drain.blocks):
                return True
        if (why := self._needed(drain)) is not None:
            return self._cancel_drain(drain, why, now)
        self._unload_blocks(device, drain.blocks)
        for block in sorted(block for block in drain.blocks if block in device.plan.blocks):
            state.block_map.remove(block, drain.source)
            self.counts.dropped += 1
            state.tell.control(now, "instance.drop", drain.cause, drain.source, block)
        return False

    def _needed(self, drain: Drain) -> str | None:
        """Return why instances cannot be removed now, or None."""
        state = self._state
        if not all(state.block_map.spare(block, drain.source) for block in drain.blocks):
            return LAST
        if any(state.router.spoils(state.in_use(), block, drain.source) for block in drain.blocks):
            return SHORTENS
        return None

    def _awaited(self, device: Device, blocks: frozenset[str]) -> bool:
        """Return whether something under way to a device needs these blocks: a stage, a migration, an offered hop."""
        if device.stages.brings(blocks) or self._migrations.moves.bound_for(device.name, blocks):
            return True
        asked = (self._state.running[seq] for seq in device.passing.asked)
        hops = ((sequence.chain, sequence.path[sequence.offered.devices[device.name]]) for sequence in asked)
        return any(not blocks.isdisjoint(chain.blocks(hop.lo, hop.hi)) for chain, hop in hops)

    def _stays(self, device: str, chain: Chain, part: range) -> bool:
        """Return whether a device is to hold these blocks of a chain from now on."""
        blocks = [chain.uses[at].block for at in part]
        known, leaving = self._state.devices[device], self._state.block_map.leaving
        there = known.alive and known.plan.blocks.issuperset(blocks)
        return there and not any((block, device) in leaving for block in blocks)

    def _send_on(self, sequence: ScheduledSequence, part: range, drain: Drain, now: int) -> None:
        """Start the migration of a sequence off a draining instance, if the limit of migrations allows it."""
        if sequence.waits.move or len(self._migrations) >= self._state.config.control.max_migrations:
            return
        target = drain.target
        if target is None or not self._stays(target, sequence.chain, part):
            found = elsewhere(self._state, sequence.chain, part, drain.source)
            if found is None and len(part) > 1:
                part = range(part.start, part.start + 1)
                found = elsewhere(self._state, sequence.chain, part, drain.source)
            target = found.name if found is not None else None
        if target is not None:
            self._start(sequence, part, target, drain.cause, now)

    def _recall(self, drain: Drain, blocks: frozenset[str], now: int) -> None:
        """End a drain for some of its instances, which stay; the rest continues to drain."""
        at = self._drains.index(drain)
        self._drains[at : at + 1] = [replace(drain, blocks=drain.blocks - blocks)] if drain.blocks - blocks else []
        self._cancel_drain(replace(drain, blocks=blocks), "it is asked for again", now)

    def _cancel_drain(self, drain: Drain, why: str, now: int) -> bool:
        """Record that the instances of a drain stay, with the reason; returns False."""
        self._state.block_map.leaving.difference_update((block, drain.source) for block in drain.blocks)
        self.counts.kept += 1
        self._state.tell.control(now, "instance.keep", drain.cause, drain.source, min(drain.blocks), error=why)
        return False

    def _unload_blocks(self, device: Device, blocks: frozenset[str]) -> None:
        """Unload all stages with these blocks from a device, and drop cached prefixes on it."""
        self._prefix_cache.remove_device(device.name)
        gone = device.stages.remove_blocks(blocks)
        if gone and device.alive:
            self._state.unload(device.name, gone)


def runs(sequence: ScheduledSequence, device: str, blocks: Collection[str]) -> Iterator[range]:
    """Yield the runs of block numbers in a sequence's chain that are among `blocks` and run on a device, in order."""
    uses = sequence.chain.uses
    spans = [(hop.lo, hop.hi) for hop in sequence.path if hop.device == device]
    first: int | None = None
    for at, use in enumerate(uses):
        inside = use.block in blocks and any(lo <= use.lo and use.hi <= hi for lo, hi in spans)
        if inside and first is None:
            first = at
        if not inside and first is not None:
            yield range(first, at)
            first = None
    if first is not None:
        yield range(first, len(uses))


def elsewhere(state: ClusterState, chain: Chain, part: range, source: str) -> Device | None:
    """Return the living device with the fewest sequences that keeps all these blocks, without `source`; or None."""
    blocks = [chain.uses[at].block for at in part]
    fitting = (device for device in holders(state, blocks, source) if device.name != source)
    return min(fitting, key=lambda device: (device.passing.count, device.pages.used), default=None)


def holders(state: ClusterState, blocks: Collection[str], source: str = "") -> list[Device]:
    """Return living devices that keep all these blocks; of very many a few, different ones each time.

    `source`: where sequences come from; only devices that run all of its phases.
    """
    placed, devices = state.block_map, state.devices
    lists = [placed.instances.get(block, ()) for block in dict.fromkeys(blocks)]
    shortest = min(lists, key=len, default=())
    going = {name for block, name in placed.leaving if block in blocks} | state.devices.roles.leaving.keys()
    found: list[Device] = []
    first = state.router.turn() % len(shortest) if len(shortest) > _FEW else 0
    for at in range(len(shortest)):
        device = devices[shortest[(first + at) % len(shortest)]]
        runs_them = not source or state.devices.roles[device.name].covers(state.devices.roles[source])
        if device.alive and runs_them and device.name not in going and device.plan.blocks.issuperset(blocks):
            found.append(device)
            if len(found) == _FEW:
                break
    return found
