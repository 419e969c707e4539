"""State that all parts of the scheduler share: devices, placement, sequences, and the outbox that collects commands.

Contract: data only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.chains import Chain, Stage, Variant
from runtime.config import ClusterConfig
from runtime.control.counters import Counters
from runtime.control.trace_events import TraceEvents
from runtime.policy.batching.block_limits import block_limit, rows_in_memory
from runtime.policy.residency.eviction import StageWeights, footprint_of
from runtime.scheduler.admission.waiting_queue import WaitingQueue
from runtime.scheduler.devices.devices import Devices
from runtime.scheduler.kv.page_accounting import PageAccounting
from runtime.scheduler.kv.prefix_index import PrefixIndex
from runtime.scheduler.kv.shared_prompts import SharedPrompts
from runtime.scheduler.kv.swapping import Swapping
from runtime.scheduler.lending.limits import LendingLimits
from runtime.scheduler.observe.measured_times import MeasuredTimes
from runtime.scheduler.order.cells import CellAssignment
from runtime.scheduler.order.deadlines import DeadlineOrder
from runtime.scheduler.outbox import CommandOutbox
from runtime.scheduler.placement.block_map import BlockMap, blocks_of
from runtime.scheduler.routing.router import Router
from runtime.scheduler.routing.used_paths import UsedPaths
from runtime.scheduler.sequences.lengths import ExpectedLengths
from runtime.scheduler.sequences.sequence import ScheduledSequence


@dataclass(slots=True)
class ClusterState:
    """The shared state of one scheduler.

    Fields:
        chains: The version of each model that new sequences get.
        out: Commands of the current event.
        running, waiting: Every live sequence is in exactly one of the two.
        starved: Running sequences that wait for pages.
        queued: Names of running sequences whose next row waits for a chunk of prompts (`scheduler.prefill`).
        awaited: Devices that lack room for a sequence that is to be handed off: new ones do not pass it there.
        ready: Sequences with a next row that may be issued at the end of the current event.
        limits: What a path holds of a sequence, with what other devices hold for it.
        users: Number of live sequences, by `Chain.loaded_as`.
        variants: Variants of a chain, by its `loaded_as`.
        coming: Chains that are being made ready, by model, each with its variants.
        leaving: Chains that no new sequence gets, by `loaded_as`, while sequences or stages of them remain.
        changed: Whether a waiting sequence might fit now: then admission and model updates run at the end of the event.
        placed: Whether blocks have been placed on devices.
        order: Deadlines and predicted times; None where sequences run by arrival.
        lengths: Expected lengths of answers; None where nothing depends on them.
        cells: Serving cells; None where sequences run on any devices.
    """

    config: ClusterConfig
    chains: dict[str, Chain]
    devices: Devices
    block_map: BlockMap
    router: Router
    used_paths: UsedPaths
    tell: TraceEvents
    page_accounting: PageAccounting
    times: MeasuredTimes
    prompts: SharedPrompts
    swapping: Swapping
    limits: LendingLimits
    out: CommandOutbox = field(default_factory=CommandOutbox)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    counters: Counters = field(default_factory=Counters)
    sequences: dict[str, ScheduledSequence] = field(default_factory=dict)
    running: dict[str, ScheduledSequence] = field(default_factory=dict)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    starved: dict[str, ScheduledSequence] = field(default_factory=dict)
    awaited: frozenset[str] = frozenset()
    queued: set[str] = field(default_factory=set)
    ready: list[ScheduledSequence] = field(default_factory=list)
    users: Counter[str] = field(default_factory=Counter)
    variants: dict[str, tuple[Variant, ...]] = field(default_factory=dict)
    coming: dict[str, tuple[Chain, ...]] = field(default_factory=dict)
    leaving: dict[str, Chain] = field(default_factory=dict)
    changed: bool = False
    placed: bool = False
    order: DeadlineOrder | None = None
    lengths: ExpectedLengths | None = None
    cells: CellAssignment | None = None

    def in_use(self) -> list[Chain]:
        """Return every chain that new or live sequences may need, with variants and chains on their way in or out."""
        served = [*self.chains.values(), *(chain for some in self.coming.values() for chain in some)]
        variants = [variant.chain for some in self.variants.values() for variant in some]
        return [*served, *variants, *(chain for name, chain in self.leaving.items() if self.users[name] > 0)]

    def ask_for(self, chain: Chain, device: str, stage: Stage) -> bool:
        """Send the load of a stage, unless it is loading or was refused, or does not fit; return whether it loads."""
        stages = self.devices[device].stages
        if stage in stages.loading:
            return True
        if stage in stages.refused or not self.fits(chain, device, stage):
            return False
        stages.loading.add(stage)
        stages.wanted[stage] = blocks = blocks_of(chain, stage)
        stages.own_bytes[stage] = self.weights_of(chain, stage).own
        self.times.loads.begin(device, stage, self.sizes_of(blocks), stages.own_bytes[stage], self.warm_sizes(device))
        self.load(device, [(stage, blocks)])
        return True

    def fits(self, chain: Chain, device: str, stage: Stage) -> bool:
        """Return whether a stage fits beside those loaded and loading and the pages in use, where memory is limited."""
        plan, pages = self.devices[device].plan, self.devices[device].pages
        if self.config.residency == "fixed" or not (plan.limit or self.config.order.excludes):
            return True
        held, incoming = footprint_of(self.resident(device)), self.weights_of(chain, stage)
        limit = self.limit_with(stage.model, device, incoming)
        return held.nbytes + held.missing(incoming) <= min(limit, pages.weights_beside(pages.used))

    def limit_with(self, model: str, device: str, incoming: StageWeights) -> int:
        """Return the bytes of weights that a device may hold once it has an incoming stage of a model.

        Where a cell has one model at a time, these are the model's own; what another one has in common with it stays.
        """
        limit = self.devices[device].plan.limit
        if not self.config.order.excludes:
            return limit
        own = footprint_of([incoming, *self.resident(device, model)]).nbytes
        return min(limit or own, own)

    def load(self, device: str, stages: Sequence[tuple[Stage, tuple[str, ...]]]) -> None:
        """Send the load of stages, each with its blocks, that count as loading."""
        counts = self._components(stages)
        self.out.load(device, stages, self._share(device), counts, self._row_limits(device, stages))

    def read_ahead(self, device: str, stages: Sequence[tuple[Stage, tuple[str, ...]]]) -> None:
        """Send what host memory is to read, each stage with its blocks."""
        counts = self._components(stages)
        if counts or not stages:
            self.out.read_ahead(device, stages, counts)

    def _components(self, stages: Sequence[tuple[Stage, tuple[str, ...]]]) -> tuple[tuple[int, ...], ...]:
        """Return the number of components of each block of each stage; nothing unless all are known."""
        blocks = self.block_map
        counts = tuple(
            tuple(blocks.block(name).components if blocks.knows(name) else 0 for name in some) for _, some in stages
        )
        return counts if all(count > 0 for some in counts for count in some) else ()

    def _row_limits(self, device: str, stages: Sequence[tuple[Stage, tuple[str, ...]]]) -> tuple[tuple[str, int], ...]:
        """Return the blocks of stages that take fewer rows than a step, each with its limit (BL-14)."""
        config, estimates = self.config, self.router.estimates
        fixed = config.max_batch_per_block or config.max_num_seqs
        limits = {block: fixed for _, blocks in stages for block in blocks} if config.max_batch_per_block else {}
        if not config.batch_gain or estimates is None:
            return tuple(limits.items())
        widths = {chain.loaded_as: chain.spec.page_tokens for chain in self.in_use()}
        for stage, blocks in stages:
            for block in blocks if stage.model in widths else ():
                decode = estimates.decode_of(block)
                if decode is not None and self.block_map.knows(block):
                    layers = self.block_map.block(block).kv_layers
                    most = rows_in_memory(self.devices[device].pages.capacity, layers, widths[stage.model])
                    limits[block] = block_limit(decode, config.batch_gain, min(fixed, most))
        return tuple(limits.items())

    def unload(self, device: str, stages: Sequence[Stage], coming: tuple[Stage, ...] = ()) -> None:
        """Send the unload of stages, which count as gone; `coming` are loaded in their place."""
        self.out.unload_stages(device, stages, self._share(device), coming)

    def load_failed(self, device: str) -> None:
        """Give the pages of a device what a stage that was not loaded leaves."""
        if self.devices[device].pages.budget:
            self.unload(device, ())

    def _share(self, device: str) -> int:
        """Give a device's pages what its stages leave of the budget; return the capacity, -1 without a budget."""
        pages = self.devices[device].pages
        if not pages.budget:
            return -1
        pages.give_rest(footprint_of(self.resident(device)).nbytes)
        return pages.capacity

    def resident(self, device: str, model: str = "") -> Iterable[StageWeights]:
        """Yield the bytes of each loaded or loading stage of a device, of one model or of all."""
        stages = self.devices[device].stages
        for stage in {*stages.loaded, *stages.loading}:
            if model and stage.model != model:
                continue
            yield StageWeights(self.sizes_of(stages.wanted.get(stage, ())), stages.own_bytes.get(stage, 0))

    def weights_of(self, chain: Chain, stage: Stage) -> StageWeights:
        """Return the bytes of a chain's stage."""
        own = sum(use.adapter_bytes for use in chain.uses if stage.lo <= use.lo and use.hi <= stage.hi)
        return StageWeights(self.sizes_of(blocks_of(chain, stage)), own)

    def warm_sizes(self, device: str) -> Mapping[str, int]:
        """Return the bytes of the blocks and tables of a device's loaded stages, by name."""
        return self.sizes_of(self.devices[device].stages.warm)

    def sizes_of(self, blocks: Iterable[str]) -> Mapping[str, int]:
        """Return the bytes of blocks and of their tables, by name; those of a removed chain are left out."""
        found: dict[str, int] = {}
        for block in (self.block_map.block(name) for name in blocks if self.block_map.knows(name)):
            found.update(block.tables)
            found[block.id] = block.nbytes - sum(size for _, size in block.tables)
        return found

    def check(self) -> None:
        """Raise RuntimeError unless sequences and queues agree."""
        self.devices.check()
        self.swapping.check(self.sequences.values())
        waiting = {sequence.seq for sequence in self.waiting}
        if set(self.sequences) != set(self.running) | waiting or waiting & set(self.running):
            raise RuntimeError("members are not either waiting or running")
        if +self.users != Counter(sequence.chain.loaded_as for sequence in self.sequences.values()):
            raise RuntimeError("the versions' users are not those who are alive")
        for sequence in self.running.values():
            if not sequence.path:
                raise RuntimeError(f"{sequence.seq} runs nowhere")
            if (
                sequence.flying == (sequence.seq in self.starved or sequence.seq in self.queued)
                and not sequence.waits.held
                and sequence.waits.paused is None
                and not sequence.waits.skipped
                and not sequence.waits.handoff
            ):
                raise RuntimeError(f"{sequence.seq} neither runs a row nor waits for pages")
