"""The devices of a cluster as its scheduler knows them: pages that are spoken for, blocks and stages that are there,
who is alive.

Contract: `DevicePages.used` counts pages of sequences that were let in, never more than there are (whose they are
knows `scheduler.kv.page_accounting`); `idle` those among them that only donors use. The agents' own books follow
(an agent frees a little later than the scheduler closes). A stage is wanted, loading, or loaded. A device that died
keeps its name and what it is to hold; what it held is gone. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from runtime.chains import Lack, Stage
from runtime.messages import AgentHello
from runtime.types import ModelSpec

if TYPE_CHECKING:  # members hold pages, which are devices'
    from runtime.scheduler.sequences.sequence import ScheduledSequence

#: Room of a device that takes any number of bytes.
ANY = 1 << 60
#: A stage that was refused is not asked for again before so long, in ns; twice as long each time that it is refused
#: again, up to the most.
_PAUSE, _LONGEST = 15_000_000_000, 960_000_000_000


@dataclass(frozen=True, slots=True)
class Refusal:
    """Of a stage: why, for the `times`th time in a row, and until when it is not asked for again, in ns."""

    why: str
    times: int
    until: int


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What stays as long as a device lives. `server`: the machine that it is on; `pid`: its agent's process there, 0 if
    it has none; `inputs`: bytes that it keeps of what came into its stages; `lacks`: what its engine cannot do."""

    server: str = ""
    pid: int = 0
    inputs: int = 0
    lacks: tuple[Lack, ...] = ()


@dataclass(slots=True)
class DevicePages:
    """Pages of K and V. `page_bytes`: of one; `used`: taken for sequences, `idle` of them for ended ones only."""

    capacity: int
    page_bytes: int = 0
    used: int = 0
    idle: int = 0

    @property
    def free(self) -> int:
        return self.capacity - self.used

    @property
    def used_pages(self) -> int:
        """Pages of sequences that are alive."""
        return self.used - self.idle

    @property
    def share(self) -> float:
        """Of its pages: those that are taken."""
        return self.used_pages / self.capacity if self.capacity else 1.0


@dataclass(slots=True)
class Plan:
    """Blocks that a device is to hold, of `nbytes`. `limit`: bytes of weights that it takes, 0 for any."""

    limit: int
    blocks: set[str] = field(default_factory=set)
    nbytes: int = 0

    @property
    def room(self) -> int:
        """Bytes that it takes beside what it is to hold."""
        return self.limit - self.nbytes if self.limit else ANY

    def add(self, block: str, nbytes: int) -> None:
        self.blocks.add(block)
        self.nbytes += nbytes

    def remove(self, block: str, nbytes: int) -> None:
        self.blocks.discard(block)
        self.nbytes -= nbytes


@dataclass(slots=True)
class DeviceStages:
    """`wanted`: stages that have been asked for, with their blocks; `loading` and `loaded` of them; `warm`: blocks of
    those that are loaded, `nbytes` in all. `refused`: why, of those that are not to be asked for now; `refusals`: of
    all that were refused and have not been loaded since."""

    wanted: dict[Stage, tuple[str, ...]] = field(default_factory=dict)
    loading: set[Stage] = field(default_factory=set)
    loaded: dict[Stage, ModelSpec] = field(default_factory=dict)
    warm: set[str] = field(default_factory=set)
    nbytes: int = 0
    refused: dict[Stage, str] = field(default_factory=dict)
    refusals: dict[Stage, Refusal] = field(default_factory=dict)

    def gained(self, stage: Stage, spec: ModelSpec) -> None:
        """A stage is loaded."""
        self.loading.discard(stage)
        self.loaded[stage] = spec
        self.pardon(stage)
        self.warm.update(self.wanted.get(stage, ()))

    def refuses(self, stage: Stage, why: str, now: int) -> None:
        """A stage cannot be loaded; perhaps it can later."""
        known = self.refusals.get(stage)
        times = 1 if known is None else known.times + 1
        self.loading.discard(stage)
        self.refused[stage] = why
        self.refusals[stage] = Refusal(why, times, now + min(_PAUSE << min(times - 1, 16), _LONGEST))

    def relents(self, now: int) -> bool:
        """Whether there are stages that may be asked for again from now on."""
        over = [stage for stage in self.refused if self.refusals[stage].until <= now]
        for stage in over:
            del self.refused[stage]
        return bool(over)

    def pardon(self, stage: Stage) -> None:
        """It is loaded, or nobody's any more."""
        self.refused.pop(stage, None)
        self.refusals.pop(stage, None)

    def remove_blocks(self, blocks: Collection[str]) -> list[Stage]:
        """Forget all stages that have any of these blocks; those of them that are loaded."""
        gone = [stage for stage, made in self.wanted.items() if not set(blocks).isdisjoint(made)]
        loaded = [stage for stage in gone if self.loaded.pop(stage, None) is not None]
        for stage in gone:
            del self.wanted[stage]
        self.cool()
        return loaded

    def cool(self) -> None:
        """Stages have gone."""
        self.warm = {block for stage in self.loaded for block in self.wanted.get(stage, ())}

    def brings(self, blocks: Collection[str]) -> bool:
        """Whether a stage with any of these blocks is being loaded."""
        loading = (self.wanted[stage] for stage in self.loading if stage in self.wanted)
        return any(not set(made).isdisjoint(blocks) for made in loading)

    def has(self, stage: Stage) -> bool:
        return stage in self.loaded

    def clear(self) -> None:
        """Its device has died: what was loaded there is gone."""
        self.loading.clear()
        self.loaded.clear()
        self.warm.clear()
        self.nbytes = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What a device last reported, as in `messages.Report`: rows that wait there, by block too, and totals since its
    agent began."""

    queued: int = 0
    queues: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    busy: int = 0
    tokens: int = 0
    links: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Passing:
    """Sequences of a device. `here`: those whose paths pass it, by name; `asked`: those that it may come to run a hop
    of (BL-23)."""

    here: dict[str, ScheduledSequence] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)

    @property
    def count(self) -> int:
        """Sequences whose paths pass it."""
        return len(self.here)

    @property
    def expected(self) -> int:
        """Sequences that pass it, or may come to."""
        return len(self.here) + len(self.asked)


@dataclass(slots=True)
class Device:
    """`final`: it does not come back."""

    name: str
    facts: DeviceFacts
    pages: DevicePages
    plan: Plan
    stages: DeviceStages = field(default_factory=DeviceStages)
    work: Work = field(default_factory=Work)
    passing: Passing = field(default_factory=Passing)
    alive: bool = True
    final: bool = False

    @property
    def copies(self) -> bool:
        """Whether a shared prefix is there once for each of its sequences: the engine cannot share pages."""
        return "pages" in self.facts.lacks


class Devices:
    """`loads`: sequences by device, as `policy.routing.paths` wants them. `living`: devices that are alive, by name."""

    def __init__(self) -> None:
        self._devices: dict[str, Device] = {}
        self.loads: dict[str, float] = {}
        self.living: dict[str, Device] = {}

    def __len__(self) -> int:
        return len(self._devices)

    def __iter__(self) -> Iterator[Device]:
        """In the order in which they came."""
        return iter(self._devices.values())

    def __getitem__(self, name: str) -> Device:
        return self._devices[name]

    def get(self, name: str) -> Device | None:
        return self._devices.get(name)

    def alive(self, name: str) -> bool:
        return name in self.living

    def up(self, ready: AgentHello) -> Device:
        """A device is there, for the first time or again; then it is empty, with what it is to hold on its list."""
        known = self._devices.get(ready.device)
        facts = DeviceFacts(ready.server, ready.pid, ready.activation_cache_bytes, ready.lacks)
        made = Device(ready.device, facts, DevicePages(ready.page_capacity, ready.page_bytes), Plan(ready.weights))
        if known is not None:
            made.plan = Plan(ready.weights, known.plan.blocks, known.plan.nbytes)
            made.stages.wanted = known.stages.wanted
        self._devices[ready.device] = self.living[ready.device] = made
        self.loads[ready.device] = 0.0
        return made

    def down(self, name: str) -> None:
        device = self._devices[name]
        device.alive = False
        self.living.pop(name, None)
        device.pages.used = device.pages.idle = 0
        device.stages.clear()
        device.work = replace(device.work, queued=0, queues={})
        device.passing = Passing()
        self.loads[name] = 0.0

    def enter(self, name: str, sequence: ScheduledSequence) -> None:
        """One more sequence passes it."""
        self._devices[name].passing.here[sequence.seq] = sequence
        self.loads[name] += 1.0

    def depart(self, name: str, sequence: ScheduledSequence) -> None:
        del self._devices[name].passing.here[sequence.seq]
        self.loads[name] -= 1.0

    def check(self) -> None:
        """Raises RuntimeError if more pages are spoken for than there are, or fewer than none; or if the living are not
        those alive."""
        if set(self.living) != {device.name for device in self if device.alive}:
            raise RuntimeError("the living devices are not those that are alive")
        for device in self:
            pages = device.pages
            if not 0 <= pages.idle <= pages.used <= pages.capacity:
                raise RuntimeError(
                    f"{device.name}: {pages.used} of {pages.capacity} pages are spoken for, {pages.idle} of them idle"
                )
