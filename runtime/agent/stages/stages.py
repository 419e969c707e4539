"""Track the stages of one device: which are loaded, their blocks, the row limits of blocks, and pending unloads.

`StageTable.handle` takes orders of the scheduler and answers of the engine, and returns commands. A stage is dropped
once the engine has forgotten all page tables on it (`agent.stages.unloading`); loading it again before that cancels the
unload.
"""

from __future__ import annotations

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.stages.host_tier import HostTier
from runtime.agent.stages.unloading import UnloadingStages
from runtime.chains import Stage
from runtime.control.agent_io import (
    AgentCommand,
    DropStage,
    HostChanged,
    LoadStage,
    ReadStagesAhead,
    Send,
    StageFailed,
    StageLoaded,
    StageRead,
)
from runtime.kv.pages import pages_for
from runtime.messages import SCHEDULER, LoadStages, ReadAhead, StageLoadFailed, StageReady, UnloadStages
from runtime.policy.batching.step import Blocks
from runtime.types import ModelSpec


class StageTable:
    """The loaded stages of one device.

    `max_rows`: row limit of a step, and of each block without a limit of its own.
    """

    def __init__(self, device: str, tables: SequencePageTables, max_rows: int) -> None:
        self._device, self._tables = device, tables
        self._max_rows = max_rows
        #: Stages that are dropped between steps, once no page table is on them.
        self.unloading = UnloadingStages(tables)
        self._blocks: dict[str, tuple[str, ...]] = {}
        #: Times in ns: when each stage that is being loaded was ordered, and when the engine was done with one.
        self._ordered: dict[str, int] = {}
        self._loaded_last = 0
        self._limits: dict[str, int] = {}
        self._host = HostTier(device)
        self.specs: dict[str, ModelSpec] = {}
        #: Blocks of each stage and row limits of blocks, for the batching policy.
        self.blocks = Blocks(self._blocks, self._limits)

    @property
    def limited(self) -> bool:
        """Whether a block takes fewer rows than a step."""
        return any(limit < self._max_rows for limit in self._limits.values())

    @property
    def parts(self) -> bool:
        """Whether a stage is ready to be dropped as soon as no step runs."""
        return self.unloading.waits

    def queue_of(self, stage: str) -> str:
        """Return the block that rows of a stage wait for: its first one."""
        return self._blocks.get(stage, (stage,))[0]

    def handle(
        self,
        event: LoadStages | ReadAhead | UnloadStages | StageLoaded | StageRead | StageFailed | HostChanged,
        now: int,
    ) -> list[AgentCommand]:
        match event:
            case ReadAhead():
                self._host.expect_ahead(event.stages, event.blocks, event.counts)
                return [ReadStagesAhead(event.stages)]
            case StageRead():
                self._host.add_read(event.stage, event.units)
                return [*self._host.change(event.host)]
            case LoadStages():
                return self._load(event, now)
            case UnloadStages():
                for stage in event.stages:
                    self.specs.pop(stage.id, None)
                    self._blocks.pop(stage.id, None)
                there = {block for blocks in self._blocks.values() for block in blocks}
                self._limits = {block: limit for block, limit in self._limits.items() if block in there}
                self.blocks = Blocks(self._blocks, self._limits)
                self.unloading.schedule_unload(event.stages, event.pages, event.coming)
                return []
            case StageLoaded():
                took = self._work_on(event.stage, now)
                if (why := self._too_small(event.spec)) is not None:
                    self._blocks.pop(event.stage.id, None)
                    return [DropStage(event.stage), Send(SCHEDULER, StageLoadFailed(self._device, event.stage, why))]
                self.specs[event.stage.id] = event.spec
                disk, host = -1, 0
                if (brought := event.brought) is not None:
                    self._host.add_units(event.stage.id, brought.units)
                    disk, host = brought.disk, brought.host
                ready = StageReady(self._device, event.stage, event.spec, event.nbytes, took, disk, host)
                return [Send(SCHEDULER, ready), *self._host.change(event.host)]
            case HostChanged():
                return [*self._host.change(event.units, event.dropped)]
            case StageFailed():
                self._work_on(event.stage, now)
                self._blocks.pop(event.stage.id, None)
                self._host.cancel_stage(event.stage.id)
                return [Send(SCHEDULER, StageLoadFailed(self._device, event.stage, event.reason))]

    def _too_small(self, spec: ModelSpec) -> str | None:
        """Return why the device has too few pages for a single token of a stage; None if it has enough."""
        need, have = pages_for(spec, spec.virtual_tokens + 1), self._tables.book.capacity
        if need <= have:
            return None
        return f"{spec.name} needs {need} pages for its first token, the device has {have}: enlarge the KV pool"

    def _work_on(self, stage: Stage, now: int) -> int:
        """Return the time in ns that the engine, which loads one stage after another, has spent on a stage."""
        began = max(self._ordered.pop(stage.id, now), self._loaded_last)
        self._loaded_last = now
        return max(now - began, 0)

    def _load(self, order: LoadStages, now: int) -> list[AgentCommand]:
        every = order.counts or ((),) * len(order.stages)
        for stage, blocks, counts in zip(order.stages, order.blocks, every, strict=True):
            self._blocks[stage.id] = blocks
            self._host.expect_stage(stage, blocks, counts)
            self._ordered[stage.id] = now
            for block in blocks:
                self._limits.setdefault(block, self._max_rows)
        self._limits.update(order.limits)
        self.unloading.cancel_unload(order.stages)
        return [*self.unloading.delay_loads(map(LoadStage, order.stages), order.pages)]
