"""The scheduler's record of the devices: pages taken, blocks and stages on them, and which devices are alive.

Contract:
- `DevicePages.used` counts pages of admitted sequences, never more than the capacity; `idle` those among them that only
  cached prefixes use. `scheduler.kv.page_accounting` has the holders. Agents free pages a little later.
- Where weights and pages share a budget, the capacity is what the loaded and loading stages leave of it; an agent is
  told with each load and unload, and keeps their order. So neither weights nor pages exceed the budget at any moment.
- A stage is wanted, loading, or loaded.
- A device that died keeps its name and its planned blocks; its pages and stages are gone.
- It decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from runtime.chains import Lack, Stage
from runtime.messages import AgentHello
from runtime.scheduler.devices.roles import DeviceRoles
from runtime.types import ModelSpec

if TYPE_CHECKING:  # the modules import each other: sequences hold pages of devices
    from runtime.scheduler.sequences.sequence import ScheduledSequence

#: Room of a device without a limit, in bytes.
ANY = 1 << 60
#: Pause in ns before a refused stage is requested again, doubled with each refusal in a row up to the second number.
_PAUSE, _LONGEST = 15_000_000_000, 960_000_000_000


@dataclass(frozen=True, slots=True)
class Refusal:
    """A stage that a device could not load.

    Fields:
        why: The reason.
        times: Refusals in a row.
        until: Time in ns before which the load is not retried.
    """

    why: str
    times: int
    until: int


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about a device that hold for one incarnation of its agent.

    Fields:
        server: The machine that it is on.
        pid: Process of its agent there, 0 if it has none.
        inputs: Bytes of stage inputs that it keeps, for migrations.
        lacks: What its engine cannot do.
        fetch_sets: Page sets of a migration to it that are under way at once.
        recompute_chunk: Tokens that a migration to it recomputes at a time.
        host_memory: Bytes of host memory for K and V of sequences that give way, shared with weights that wait.
        copies_beside: Whether K and V are copied there and back while steps run.
        between_steps: Whether its agent handles messages between its steps only.
    """

    server: str = ""
    pid: int = 0
    inputs: int = 0
    lacks: tuple[Lack, ...] = ()
    fetch_sets: int = 8
    recompute_chunk: int = 64
    host_memory: int = 0
    copies_beside: bool = False
    between_steps: bool = False


@dataclass(slots=True)
class DevicePages:
    """K and V pages of a device.

    Fields:
        capacity: Pages in all, now.
        page_bytes: Bytes per page.
        used: Pages taken for sequences, cached prefixes and migrations.
        idle: Pages among `used` that only cached prefixes use.
        budget: Bytes of weights and pages together; 0: the capacity does not depend on weights.
        most: Pages with no weights at all, where there is a budget.
        least: Pages beside as many weights as the device takes, where there is a budget.
    """

    capacity: int
    page_bytes: int = 0
    used: int = 0
    idle: int = 0
    budget: int = 0
    most: int = 0
    least: int = 0

    @property
    def free(self) -> int:
        return self.capacity - self.used

    @property
    def assured(self) -> int:
        """Pages that it has whatever is loaded: a sequence that needs no more can always run."""
        return self.least if self.budget else self.capacity

    def weights_beside(self, pages: int) -> int:
        """Return the bytes of weights for which so many pages leave room."""
        return self.budget - pages * self.page_bytes if self.budget else ANY

    def give_rest(self, weights: int) -> None:
        """Set the capacity to what these bytes of weights leave of the budget."""
        self.capacity = min(self.most, (self.budget - weights) // self.page_bytes)

    @property
    def used_pages(self) -> int:
        """Pages in use, without those that only cached prefixes use."""
        return self.used - self.idle

    @property
    def share(self) -> float:
        """Share of its pages that is in use."""
        return self.used_pages / self.capacity if self.capacity else 1.0


@dataclass(slots=True)
class Plan:
    """Blocks that a device is to hold.

    Fields:
        limit: Bytes of weights that it takes, 0 for no limit.
        blocks: The planned blocks.
        nbytes: Bytes of the planned blocks.
    """

    limit: int
    blocks: set[str] = field(default_factory=set)
    nbytes: int = 0

    @property
    def room(self) -> int:
        """Bytes of weights that it takes beyond the planned blocks."""
        return self.limit - self.nbytes if self.limit else ANY

    def add(self, block: str, nbytes: int) -> None:
        self.blocks.add(block)
        self.nbytes += nbytes

    def remove(self, block: str, nbytes: int) -> None:
        self.blocks.discard(block)
        self.nbytes -= nbytes


@dataclass(slots=True)
class DeviceStages:
    """Stages of a device.

    Fields:
        wanted: Stages that have been requested, each with its blocks.
        loading: Requested stages that are being loaded.
        loaded: Loaded stages, each with its spec.
        warm: Blocks of the loaded stages.
        nbytes: Bytes of the loaded weights, as reported.
        own_bytes: Bytes of stages beside their blocks, such as adapters.
        refused: Stages that are not to be requested now, each with the reason.
        refusals: All stages that were refused and have not been loaded since.
    """

    wanted: dict[Stage, tuple[str, ...]] = field(default_factory=dict)
    loading: set[Stage] = field(default_factory=set)
    loaded: dict[Stage, ModelSpec] = field(default_factory=dict)
    warm: set[str] = field(default_factory=set)
    nbytes: int = 0
    own_bytes: dict[Stage, int] = field(default_factory=dict)
    refused: dict[Stage, str] = field(default_factory=dict)
    refusals: dict[Stage, Refusal] = field(default_factory=dict)

    def gained(self, stage: Stage, spec: ModelSpec) -> None:
        """Record that a stage is loaded."""
        self.loading.discard(stage)
        self.loaded[stage] = spec
        self.pardon(stage)
        self.warm.update(self.wanted.get(stage, ()))

    def refuses(self, stage: Stage, why: str, now: int) -> None:
        """Record that a stage cannot be loaded; it may be requested again after a pause (`Refusal`)."""
        known = self.refusals.get(stage)
        times = 1 if known is None else known.times + 1
        self.loading.discard(stage)
        self.refused[stage] = why
        self.refusals[stage] = Refusal(why, times, now + min(_PAUSE << min(times - 1, 16), _LONGEST))

    def relents(self, now: int) -> bool:
        """Allow requests for stages after the end of their pause; return whether there are any."""
        over = [stage for stage in self.refused if self.refusals[stage].until <= now]
        for stage in over:
            del self.refused[stage]
        return bool(over)

    def pardon(self, stage: Stage) -> None:
        """Forget the refusals of a stage: it is loaded, or not needed any more."""
        self.refused.pop(stage, None)
        self.refusals.pop(stage, None)

    def remove_blocks(self, blocks: Collection[str]) -> list[Stage]:
        """Forget all stages with any of these blocks; return those of them that are loaded."""
        gone = [stage for stage, made in self.wanted.items() if not set(blocks).isdisjoint(made)]
        loaded = [stage for stage in gone if self.loaded.pop(stage, None) is not None]
        for stage in gone:
            del self.wanted[stage]
        self.cool()
        return loaded

    def drop_stages(self, stages: Collection[Stage]) -> None:
        """Forget loaded stages: they are unloaded."""
        for stage in stages:
            del self.loaded[stage]
            self.wanted.pop(stage, None)
        self.cool()

    def cool(self) -> None:
        """Update `warm` and `own_bytes` after stages were removed."""
        self.own_bytes = {stage: size for stage, size in self.own_bytes.items() if stage in self.wanted}
        self.warm = {block for stage in self.loaded for block in self.wanted.get(stage, ())}

    def brings(self, blocks: Collection[str]) -> bool:
        """Return whether a stage with any of these blocks is being loaded."""
        loading = (self.wanted[stage] for stage in self.loading if stage in self.wanted)
        return any(not set(made).isdisjoint(blocks) for made in loading)

    def has(self, stage: Stage) -> bool:
        return stage in self.loaded

    def clear(self) -> None:
        """Record that the device has died: no stage is loaded or loading."""
        self.loading.clear()
        self.loaded.clear()
        self.warm.clear()
        self.nbytes = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Latest report of a device (`messages.AgentStats`).

    Fields:
        queued: Rows that wait there.
        queues: Waiting rows by the block at which they enter.
        steps, busy, tokens: Totals since its agent started; `busy` in ns.
        links: Other agents with a direct tensor link, each with its state: `direct`, `making`, or why it is not used.
        prompt_tokens: Tokens of prompts among the rows that wait there.
    """

    queued: int = 0
    queues: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    busy: int = 0
    tokens: int = 0
    links: tuple[tuple[str, str], ...] = ()
    prompt_tokens: int = 0


@dataclass(slots=True)
class Passing:
    """Sequences of a device.

    Fields:
        here: Sequences with a path over the device, by name.
        asked: Names of sequences with a hop that is offered to it too (BL-23).
    """

    here: dict[str, ScheduledSequence] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)

    @property
    def count(self) -> int:
        """Sequences with a path over the device."""
        return len(self.here)

    @property
    def expected(self) -> int:
        """Sequences with a path over the device, now or possibly later."""
        return len(self.here) + len(self.asked)


@dataclass(slots=True)
class Device:
    """One device.

    Fields:
        host_used: Bytes of its host memory that are booked for K and V.
        host: Bytes of its host memory with K and V, and with weights that wait, as last reported.
        final: It has died and is not replaced.
    """

    name: str
    facts: DeviceFacts
    pages: DevicePages
    plan: Plan
    stages: DeviceStages = field(default_factory=DeviceStages)
    work: Work = field(default_factory=Work)
    passing: Passing = field(default_factory=Passing)
    alive: bool = True
    final: bool = False
    host_used: int = 0
    host: tuple[int, int] = (0, 0)

    @property
    def host_free(self) -> int:
        """Bytes of host memory that K and V may still take."""
        return self.facts.host_memory - self.host_used

    @property
    def copies(self) -> bool:
        """Whether a shared prefix is copied for each of its sequences, since the engine cannot share pages."""
        return "pages" in self.facts.lacks

    @property
    def lends(self) -> bool:
        """Whether its engine attends to K and V on another device, and for another one (IL-01)."""
        return not {"pages", "loans"} & set(self.facts.lacks)

    @property
    def enters(self) -> bool:
        """Whether rows can enter inside a stage, with pages that were shared for the layers before (UN-15)."""
        return not {"pages", "entry"} & set(self.facts.lacks)


def _pages_of(ready: AgentHello) -> DevicePages:
    pages, size = ready.page_capacity, ready.page_bytes
    if not ready.budget:
        return DevicePages(pages, size)
    return DevicePages(pages, size, 0, 0, ready.budget, pages, min(pages, (ready.budget - ready.weights) // size))


class Devices:
    """All devices, by name.

    `loads`: number of sequences by device, for `policy.routing.paths`. `living`: devices that are alive, by name.
    `roles`: what each of them runs.
    """

    def __init__(self, roles: DeviceRoles | None = None) -> None:
        self.roles = roles or DeviceRoles()
        self._devices: dict[str, Device] = {}
        self.loads: dict[str, float] = {}
        self.living: dict[str, Device] = {}

    def __len__(self) -> int:
        return len(self._devices)

    def __iter__(self) -> Iterator[Device]:
        """Iterate in the order of their first arrival."""
        return iter(self._devices.values())

    def __getitem__(self, name: str) -> Device:
        return self._devices[name]

    def get(self, name: str) -> Device | None:
        return self._devices.get(name)

    def alive(self, name: str) -> bool:
        return name in self.living

    def up(self, ready: AgentHello) -> Device:
        """Record that a device has started, and return it.

        A device that was known before is empty, and keeps its planned blocks and wanted stages.
        """
        known = self._devices.get(ready.device)
        facts = DeviceFacts(
            ready.server,
            ready.pid,
            ready.activation_cache_bytes,
            ready.lacks,
            ready.fetch_sets,
            ready.recompute_chunk,
            ready.host_memory,
            ready.copies_beside,
            ready.between_steps,
        )
        made = Device(ready.device, facts, _pages_of(ready), Plan(ready.weights))
        if known is not None:
            made.plan = Plan(ready.weights, known.plan.blocks, known.plan.nbytes)
            made.stages.wanted = known.stages.wanted
        self._devices[ready.device] = self.living[ready.device] = made
        self.loads[ready.device] = 0.0
        return made

    def down(self, name: str) -> None:
        """Record that a device has died."""
        device = self._devices[name]
        device.alive = False
        self.living.pop(name, None)
        device.pages.used = device.pages.idle = device.host_used = 0
        device.stages.clear()
        device.work = replace(device.work, queued=0, queues={})
        device.passing = Passing()
        self.loads[name] = 0.0

    def enter(self, name: str, sequence: ScheduledSequence) -> None:
        """Count one more sequence on a device."""
        self._devices[name].passing.here[sequence.seq] = sequence
        self.loads[name] += 1.0

    def depart(self, name: str, sequence: ScheduledSequence) -> None:
        """Count one sequence less on a device."""
        del self._devices[name].passing.here[sequence.seq]
        self.loads[name] -= 1.0

    def check(self) -> None:
        """Raise RuntimeError unless page counts are within bounds and `living` has exactly the devices alive."""
        if set(self.living) != {device.name for device in self if device.alive}:
            raise RuntimeError("the living devices are not those that are alive")
        for device in self:
            pages = device.pages
            if not 0 <= pages.idle <= pages.used <= pages.capacity:
                raise RuntimeError(
                    f"{device.name}: {pages.used} of {pages.capacity} pages are spoken for, {pages.idle} of them idle"
                )
