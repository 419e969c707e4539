"""Keep K and V of sequences that give way in the host memory of their devices, where that is cheaper (QL-10, QL-11).

    preempt -> save: booked on all devices of the path, or on none -> SaveSequences     (else CloseSequences)
    seat on the same path -> begin_return: OpenSequences (swapped) -> its first row is done -> end_return
    abort, end, another path, a dead device -> drop_copy

- Kept are exactly the computed tokens of a sequence at rest, on its path and for its chain. Sequences with a predicted
  or an offered hop, or in a migration, are not kept; neither is one that lost a row.
- A copy is booked from the preemption to the first row after the return. Agents enforce the limit themselves.
- A copy that turns out to be missing costs a report (`RowsLost`); the sequence then runs again from its tokens.

`policy.kv.preemption` decides. Where nothing tells what copies take, `auto` keeps a sequence to measure them: an
assumed rate that is too low would never be corrected, since nothing would be copied.

K and V take room from weights that wait: a byte of them takes longer to compute again than a byte of weights to read
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from runtime.chains import Chain, Stage
from runtime.config import ClusterConfig
from runtime.control.counters import Counters
from runtime.control.trace_events import TraceEvents
from runtime.kv.pages import groups_for
from runtime.messages import AgentStats
from runtime.policy.kv.preemption import SwapTimes, swaps
from runtime.policy.profiles import DeviceProfile
from runtime.scheduler.devices.devices import Device, Devices
from runtime.scheduler.kv.page_accounting import PageHolding
from runtime.scheduler.observe.measured_times import MeasuredTimes
from runtime.scheduler.observe.swap_costs import SwapCosts
from runtime.scheduler.outbox import CommandOutbox
from runtime.scheduler.placement.block_map import BlockMap, blocks_of
from runtime.scheduler.routing.estimates import LatencyEstimates
from runtime.scheduler.sequences.parts import Swapped
from runtime.scheduler.sequences.sequence import ScheduledSequence

#: Assumed speed of computing prompts where blocks have no profile: bytes of weights times tokens, per second.
_PROMPTS = 1e11
#: Returns the assumed seconds of a chunk of so many tokens in a stage of a chain.
ChunkTime = Callable[[Chain, Stage, int], float]


class Swapping:
    """The copies of one cluster.

    Args:
        times: Keeps estimates beside outcomes.
        profile: What `zoo profile` has measured; None for nothing.
        estimates: Profiles of blocks.
        blocks: Their weights.
    """

    def __init__(
        self, config: ClusterConfig, devices: Devices, out: CommandOutbox, counters: Counters, tell: TraceEvents,
        times: MeasuredTimes, profile: DeviceProfile | None, estimates: LatencyEstimates, blocks: BlockMap,
    ) -> None:  # fmt: skip
        self._mode, self._chunk = config.preemption_mode, config.prefill_chunk
        self._devices, self._out, self._counters, self._tell = devices, out, counters, tell
        self._costs = SwapCosts(times, profile, config.control.bandwidth)
        self._assumed = _chunk_times(estimates, blocks)
        self._kept: dict[str, ScheduledSequence] = {}

    # -- out -----------------------------------------------------------------------------------------------------------

    def save(self, sequence: ScheduledSequence, now: int) -> bool:
        """Book host memory for the K and V of a sequence that gives way; return False if they are not kept.

        A sequence that has not run a row since it came back keeps what it has.
        """
        before = sequence.swapped
        if before is not None:
            sequence.swapped = replace(before, epoch=sequence.epoch, returning=False)
            return True
        if sequence.scattered or not self._may_keep(sequence):
            return False
        groups = groups_for(sequence.spec, sequence.computed)
        weights = dict(sequence.place.weights)
        needed = {
            name: weights.get(name, 0) * groups * self._devices[name].pages.page_bytes
            for name in sorted(sequence.place.devices)
        }
        room = {name: self._devices[name].host_free for name in needed}
        if self._mode == "auto" and any(nbytes > room[name] for name, nbytes in needed.items()):
            return False
        times = self.times(sequence, needed)
        measures = self._mode == "auto" and not self._costs.copies_known and not self._kept
        if not swaps("swap" if measures else self._mode, times, needed, room):
            return False
        for name, nbytes in needed.items():
            self._devices[name].host_used += nbytes
        scores = tuple(sequence.prompt_logprobs)
        sequence.swapped = Swapped(
            sequence.epoch, sequence.path, sequence.computed, sequence.phase, tuple(needed.items()), scores
        )
        self._kept[sequence.seq] = sequence
        nbytes = sum(needed.values())
        self._counters.swapped_out += 1
        self._counters.swapped_bytes += nbytes
        self._tell.swapped(now, sequence.request, "kv.swap.out", sequence.computed, nbytes, times.swap, times.recompute)
        return True

    def times(self, sequence: ScheduledSequence, needed: dict[str, int]) -> SwapTimes:
        """Return the estimated times of both ways; devices copy at the same time, and compute one after the other."""
        out, back = (
            max((self._costs.copy_seconds(way, nbytes) for nbytes in needed.values() if nbytes), default=0.0)
            for way in (True, False)
        )
        beside = all(self._devices[name].facts.copies_beside for name in needed)
        shared = _shared_groups(sequence.pages.holding) * sequence.spec.page_tokens
        return SwapTimes(out, back, out if beside else 0.0, self._recompute(sequence, shared))

    # -- back ----------------------------------------------------------------------------------------------------------

    def begin_return(self, sequence: ScheduledSequence, now: int) -> int:
        """Let a sequence that has just been seated on the path of its copy start from there.

        Returns the epoch of the copy; 0 for a sequence without one.
        """
        swapped = sequence.swapped
        if swapped is None:
            return 0
        sequence.computed = swapped.tokens
        sequence.phase = "resume" if swapped.phase == "decode" else swapped.phase
        sequence.prompt_logprobs.extend(swapped.prompt_logprobs)
        sequence.swapped = replace(swapped, returning=True)
        self._counters.swapped_in += 1
        self._counters.swapped_tokens += swapped.tokens
        self._tell.swapped(now, sequence.request, "kv.swap.in", swapped.tokens, swapped.total)
        return swapped.epoch

    def end_return(self, sequence: ScheduledSequence) -> None:
        """Give back the room of a copy, because its sequence has run a row since it came back."""
        swapped, sequence.swapped = sequence.swapped, None
        if swapped is None:
            return
        self._kept.pop(sequence.seq, None)
        for name, nbytes in swapped.nbytes:
            if self._devices.alive(name):
                self._devices[name].host_used -= nbytes

    def drop_copy(self, sequence: ScheduledSequence) -> None:
        """Drop the copy of a sequence, if it has one, on all its devices.

        Those of a sequence on its path are about to be told to close it.
        """
        swapped = sequence.swapped
        if swapped is None:
            return
        for name, _ in () if swapped.returning else swapped.nbytes:
            if self._devices.alive(name):
                self._out.close(name, sequence.seq, swapped.epoch)
        self._counters.swapped_lost += 1
        self.end_return(sequence)

    def remove_device(self, name: str) -> None:
        """Drop the copies of waiting sequences that had a part on a device that has died."""
        for sequence in tuple(self._kept.values()):
            swapped = sequence.swapped
            if swapped is not None and not swapped.returning and any(name == device for device, _ in swapped.nbytes):
                self.drop_copy(sequence)

    # -- measurements --------------------------------------------------------------------------------------------------

    def report(self, device: Device, report: AgentStats, chains: Iterable[Chain], now: int) -> None:
        """Learn from a device's report."""
        if self._mode == "recompute":
            return
        for out, nbytes, took in report.copies:
            self._costs.add_copy(now, out, nbytes, took / 1e9)
        if not report.prompts:
            return
        named = {chain.loaded_as: chain for chain in chains}
        for name, tokens, before, took in report.prompts:
            stage = Stage.parse(name)
            chain = named.get(stage.model)
            if chain is not None and (assumed := self._assumed(chain, stage, tokens)) > 0:
                self._costs.add_chunk(now, assumed, before, took / 1e9)

    def check(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Raise RuntimeError unless booked bytes are those of the sequences' copies, within each device's memory."""
        booked: Counter[str] = Counter()
        for sequence in sequences:
            if sequence.swapped is not None:
                if sequence.swapped.returning != bool(sequence.path) or sequence.seq not in self._kept:
                    raise RuntimeError(f"{sequence.seq} has a copy that is neither kept nor coming back")
                booked.update(dict(sequence.swapped.nbytes))
        for device in self._devices:
            used = device.host_used
            if device.alive and (used != booked[device.name] or not 0 <= used <= device.facts.host_memory):
                raise RuntimeError(f"{device.name}: {used} bytes of host memory are booked, {booked[device.name]} held")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _may_keep(self, sequence: ScheduledSequence) -> bool:
        return (
            self._mode != "recompute"
            and sequence.computed > 0
            and not (sequence.flying or sequence.waits.move or sequence.offered.hops)
            and sequence.predicted is None
            and all(
                self._devices.alive(name) and self._devices[name].facts.host_memory for name in sequence.place.devices
            )
        )

    def _recompute(self, sequence: ScheduledSequence, shared: int) -> float:
        """Return the time to compute a sequence's context again, but for what it could share."""
        total, chain = 0.0, sequence.chain
        for hop in sequence.path:
            stage = chain.stage(hop.lo, hop.hi)
            for lo in range(shared, sequence.computed, self._chunk):
                count = min(self._chunk, sequence.computed - lo)
                total += self._costs.chunk_seconds(self._assumed(chain, stage, count), lo)
        return total


def _chunk_times(estimates: LatencyEstimates, blocks: BlockMap) -> ChunkTime:
    """Return what chunks take by the profiles of their blocks, or else by the bytes of these."""

    def seconds(chain: Chain, stage: Stage, tokens: int) -> float:
        names = blocks_of(chain, stage)
        profiled = estimates.prefill_seconds(names, tokens)
        return sum(blocks.block(name).nbytes for name in names) * tokens / _PROMPTS if profiled is None else profiled

    return seconds


def _shared_groups(holding: PageHolding) -> int:
    """Return the page sets of which another holder has all layers, so that they need not be computed again."""
    return min(
        (sum(extent.groups for extent in end.path() if extent.users > 1) for end in holding.ends.values()), default=0
    )
