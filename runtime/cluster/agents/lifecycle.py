"""Track the lifecycles of a cluster's agents: phase, incarnation, deaths and the next start of each device.

    starting --ready--> up --died, overdue--> down --(backoff)--> starting …
    too many deaths lately, or refused: failed, for good

- Times are nanoseconds of the driver's clock.
- An incarnation number is never used twice, so that late messages of an earlier one can be recognized.
- Each death is a strike; time that an agent is up reduces strikes. The first death is followed by an immediate restart,
  later ones by growing delays, so that an agent that dies every few seconds is not restarted for ever.

Pure bookkeeping: it starts and kills nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["starting", "up", "down", "failed"]


@dataclass(frozen=True, slots=True)
class LifeConfig:
    """When agents are restarted, given up, or considered hung.

    Fields:
        starts: Strikes at which an agent is given up.
        steady_seconds: Time up that makes up for one strike.
        backoff_seconds: Delay before the second restart; it doubles with each further one.
        backoff_most: Largest delay.
        silent_seconds: Time without a heartbeat after which an agent counts as hung.
        stalled_seconds: Time in one step or one load after which it counts as hung.
        ready_seconds: Time that a start may take.
    """

    starts: int = 6
    steady_seconds: float = 60.0
    backoff_seconds: float = 0.25
    backoff_most: float = 15.0
    silent_seconds: float = 10.0
    stalled_seconds: float = 300.0
    ready_seconds: float = 120.0

    def __post_init__(self) -> None:
        times = (
            self.steady_seconds,
            self.backoff_seconds,
            self.backoff_most,
            self.silent_seconds,
            self.stalled_seconds,
            self.ready_seconds,
        )
        if self.starts < 1 or min(times) <= 0:
            raise ValueError("the times of agents' lives must be positive")


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What `/health` reports of an agent.

    Fields:
        deaths: Number of deaths in all.
        reason: Of the last death.
        strikes: Deaths that still count.
        most: Strikes at which it is given up.
        backoff: Seconds that it stays down after the last death.
    """

    device: str
    phase: Phase
    incarnation: int
    deaths: int
    reason: str
    strikes: float = 0.0
    most: int = 0
    backoff: float = 0.0


@dataclass(frozen=True, slots=True)
class LateAgent:
    """An agent that must be killed, and why."""

    device: str
    incarnation: int
    reason: str


@dataclass(slots=True)
class _Life:
    device: str
    phase: Phase = "down"
    incarnation: int = 0
    since: int = 0
    heard: int = 0
    stalled_ms: int = 0
    due: int | None = 0
    deaths: int = 0
    strikes: float = 0.0
    backoff: int = 0
    reason: str = ""


@dataclass(slots=True)
class AgentLifecycles:
    """The lifecycle of each device's agent. All devices are due for their first start at once."""

    devices: Iterable[str]
    config: LifeConfig = field(default_factory=LifeConfig)
    _lifecycles: dict[str, _Life] = field(init=False)

    def __post_init__(self) -> None:
        self._lifecycles = {device: _Life(device) for device in self.devices}

    # -- events --------------------------------------------------------------------------------------------------------

    def ready(self, device: str, incarnation: int, now: int) -> bool:
        """Record that an agent is up; return False if this incarnation is not the one being started."""
        life = self._lifecycles.get(device)
        if life is None or life.incarnation != incarnation or life.phase != "starting":
            return False
        life.phase, life.since, life.heard, life.stalled_ms = "up", now, now, 0
        return True

    def begun(self, device: str, incarnation: int) -> bool:
        """Return whether this incarnation was started and is still the latest."""
        life = self._lifecycles.get(device)
        return life is not None and life.incarnation == incarnation > 0

    def up(self, device: str, incarnation: int) -> bool:
        """Return whether this incarnation is up, so that its messages count."""
        life = self._lifecycles.get(device)
        return life is not None and life.incarnation == incarnation and life.phase == "up"

    def beat(self, device: str, incarnation: int, stalled_ms: int, now: int) -> None:
        if self.up(device, incarnation):
            self._lifecycles[device].heard, self._lifecycles[device].stalled_ms = now, stalled_ms

    def died(
        self, device: str, incarnation: int, reason: str, now: int, *, final: bool = False, planned: bool = False
    ) -> bool:
        """Record the end of an agent; return False if it was known.

        `final`: another incarnation would end the same way. `planned`: it was ordered to end, which is no strike.
        """
        life = self._lifecycles.get(device)
        if life is None or life.incarnation != incarnation or life.phase not in ("starting", "up"):
            return False
        if planned:
            life.phase, life.due, life.reason, life.since, life.backoff = "down", now, reason, now, 0
            return True
        lived = now - life.since if life.phase == "up" else 0
        life.deaths += 1
        life.strikes = max(0.0, life.strikes - lived / (self.config.steady_seconds * 1e9)) + 1
        life.reason, life.since, life.backoff = reason, now, self._backoff(int(life.strikes))
        if final or life.strikes >= self.config.starts:
            life.phase, life.due = "failed", None
        else:
            life.phase, life.due = "down", now + life.backoff
        return True

    # -- actions -------------------------------------------------------------------------------------------------------

    def due(self, now: int) -> list[tuple[str, int]]:
        """Return the (device, incarnation) pairs to start now, and mark them as starting."""
        out: list[tuple[str, int]] = []
        for life in self._lifecycles.values():
            if life.phase == "down" and life.due is not None and life.due <= now:
                life.phase, life.since, life.due = "starting", now, None
                life.incarnation += 1
                out.append((life.device, life.incarnation))
        return out

    def overdue(self, now: int) -> list[LateAgent]:
        """Return the agents that hang or do not come up in time."""
        out: list[LateAgent] = []
        config = self.config
        for life in self._lifecycles.values():
            if life.phase == "starting" and now - life.since > config.ready_seconds * 1e9:
                out.append(
                    LateAgent(life.device, life.incarnation, f"it was not ready within {config.ready_seconds:g} s")
                )
            elif life.phase == "up" and now - life.heard > config.silent_seconds * 1e9:
                out.append(
                    LateAgent(
                        life.device, life.incarnation, f"it has not been heard of for {config.silent_seconds:g} s"
                    )
                )
            elif life.phase == "up" and life.stalled_ms > config.stalled_seconds * 1e3:
                out.append(
                    LateAgent(
                        life.device, life.incarnation, f"it has been at one step for {config.stalled_seconds:g} s"
                    )
                )
        return out

    # -- state ---------------------------------------------------------------------------------------------------------

    def incarnation(self, device: str) -> int:
        return self._lifecycles[device].incarnation

    def all_up(self) -> bool:
        return all(life.phase == "up" for life in self._lifecycles.values())

    def failed(self) -> list[str]:
        """Return the devices that will not be started again."""
        return [life.device for life in self._lifecycles.values() if life.phase == "failed"]

    def facts(self) -> tuple[AgentFacts, ...]:
        return tuple(self._facts(life) for life in self._lifecycles.values())

    def _facts(self, life: _Life) -> AgentFacts:
        backoff = life.backoff / 1e9 if life.phase == "down" else 0.0
        return AgentFacts(
            life.device,
            life.phase,
            life.incarnation,
            life.deaths,
            life.reason,
            round(life.strikes, 2),
            self.config.starts,
            backoff,
        )

    def _backoff(self, strikes: int) -> int:
        """Return the delay before the next start, in ns; 0 before the first restart."""
        if strikes < 2:
            return 0
        return int(min(self.config.backoff_most, self.config.backoff_seconds * 2.0 ** min(strikes - 2, 64)) * 1e9)
