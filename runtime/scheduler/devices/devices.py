"""The devices of a cluster as its scheduler knows them: pages that are spoken for, blocks and stages that are there,
who is alive.

Contract: `Device.used` counts pages of sequences that were let in, never more than there are (whose they are knows
`scheduler.kv.page_accounting`); `idle` those among them that only donors use. The agents' own books follow (an agent
frees a little later than the scheduler closes). A stage is wanted, loading, or loaded. A device that died keeps its
name and what it is to hold; what it held is gone. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.chains import Stage
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
    """Of a stage of a model: why, for the `times`th time in a row, and until when it is not asked for again, in ns."""

    model: str
    why: str
    times: int
    until: int


@dataclass(slots=True)
class Device:
    """`limit`: bytes of weights it takes, 0 for any. `blocks`: those that it is to hold, `planned` bytes; `wanted`:
    stages, with their blocks, that it has been asked for; `warm`: blocks of those that are loaded. `members`: sequences
    whose paths pass it, `here`: by name; `asked`: those that it may come to run a hop of (BL-23). `server`: the machine
    that it is on; `pid`: its agent's process
    there, 0 if it has none. `inputs`: bytes that it keeps of what came into its stages. `links`: as in
    `messages.Report`. `final`: it
    does not come back. `refused`: why, by stage, of those that are not to be asked for now; `refusals`: of all that
    were refused and have not been loaded since.
    """

    name: str
    capacity: int
    limit: int
    page_bytes: int = 0
    server: str = ""
    pid: int = 0
    inputs: int = 0
    alive: bool = True
    final: bool = False
    used: int = 0
    idle: int = 0
    members: int = 0
    weights: int = 0
    planned: int = 0
    here: dict[str, ScheduledSequence] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    blocks: set[str] = field(default_factory=set)
    warm: set[str] = field(default_factory=set)
    loading: set[str] = field(default_factory=set)
    loaded: dict[str, ModelSpec] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    wanted: dict[str, tuple[Stage, tuple[str, ...]]] = field(default_factory=dict)
    queued: int = 0
    queues: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    busy: int = 0
    tokens: int = 0
    links: tuple[tuple[str, str], ...] = ()

    @property
    def free(self) -> int:
        return self.capacity - self.used

    @property
    def expected(self) -> int:
        """Sequences that pass it, or may come to."""
        return self.members + len(self.asked)

    @property
    def taken(self) -> int:
        """Pages of sequences that are alive."""
        return self.used - self.idle

    @property
    def share(self) -> float:
        """Of its pages: those that are taken."""
        return self.taken / self.capacity if self.capacity else 1.0

    @property
    def room(self) -> int:
        """Bytes that it takes beside what it is to hold."""
        return self.limit - self.planned if self.limit else ANY

    def gained(self, stage: str, spec: ModelSpec) -> None:
        """A stage is loaded."""
        self.loading.discard(stage)
        self.loaded[stage] = spec
        self.pardon(stage)
        self.warm.update(self.wanted[stage][1] if stage in self.wanted else ())

    def refuses(self, stage: Stage, why: str, now: int) -> None:
        """A stage cannot be loaded; perhaps it can later."""
        known = self.refusals.get(stage.id)
        times = 1 if known is None else known.times + 1
        self.loading.discard(stage.id)
        self.refused[stage.id] = why
        self.refusals[stage.id] = Refusal(stage.model, why, times, now + min(_PAUSE << min(times - 1, 16), _LONGEST))

    def relents(self, now: int) -> bool:
        """Whether there are stages that may be asked for again from now on."""
        over = [stage for stage in self.refused if self.refusals[stage].until <= now]
        for stage in over:
            del self.refused[stage]
        return bool(over)

    def pardon(self, stage: str) -> None:
        """It is loaded, or nobody's any more."""
        self.refused.pop(stage, None)
        self.refusals.pop(stage, None)

    def lost(self, blocks: Collection[str]) -> list[Stage]:
        """Forget all stages that have any of these blocks; those of them that are loaded."""
        gone = [stage for stage, made in self.wanted.values() if not set(blocks).isdisjoint(made)]
        loaded = [stage for stage in gone if self.loaded.pop(stage.id, None) is not None]
        for stage in gone:
            del self.wanted[stage.id]
        self.cool()
        return loaded

    def cool(self) -> None:
        """Stages have gone."""
        self.warm = {block for stage in self.loaded if stage in self.wanted for block in self.wanted[stage][1]}

    def brings(self, blocks: Collection[str]) -> bool:
        """Whether a stage with any of these blocks is being loaded."""
        loading = (self.wanted[stage][1] for stage in self.loading if stage in self.wanted)
        return any(not set(made).isdisjoint(blocks) for made in loading)

    def has(self, stage: Stage) -> bool:
        return stage.id in self.loaded


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
        made = Device(
            ready.device, ready.page_capacity, ready.weights, ready.page_bytes, ready.server, ready.pid, ready.inputs
        )
        if known is not None:
            made.blocks, made.planned, made.wanted = known.blocks, known.planned, known.wanted
        self._devices[ready.device] = self.living[ready.device] = made
        self.loads[ready.device] = 0.0
        return made

    def down(self, name: str) -> None:
        device = self._devices[name]
        device.alive = False
        self.living.pop(name, None)
        device.used = device.idle = device.members = device.weights = device.queued = 0
        self.loads[name] = 0.0
        device.loading.clear()
        device.loaded.clear()
        device.warm.clear()
        device.queues.clear()
        device.here.clear()
        device.asked.clear()

    def enter(self, name: str, member: ScheduledSequence) -> None:
        """One more sequence passes it."""
        device = self._devices[name]
        device.members += 1
        device.here[member.seq] = member
        self.loads[name] += 1.0

    def depart(self, name: str, member: ScheduledSequence) -> None:
        device = self._devices[name]
        device.members -= 1
        del device.here[member.seq]
        self.loads[name] -= 1.0

    def check(self) -> None:
        """Raises RuntimeError if more pages are spoken for than there are, or fewer than none; or if the living are not
        those alive.
        """
        if set(self.living) != {device.name for device in self if device.alive}:
            raise RuntimeError("the living devices are not those that are alive")
        for device in self:
            if not 0 <= device.idle <= device.used <= device.capacity or device.members != len(device.here):
                raise RuntimeError(
                    f"{device.name}: {device.used} of {device.capacity} pages, {device.members} sequences"
                )
