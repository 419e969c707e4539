"""State of simulated devices, periods of timed events, and the measured cost of scheduling."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.agent.agent import Agent
from runtime.agent.steps.queue import Lane
from runtime.sim.run.engine import SimEngine
from runtime.sim.run.loading import Loader


@dataclass(slots=True)
class Node:
    """One simulated device.

    Fields:
        weights: Bytes of weights that it may hold.
        budget: Bytes of weights and pages together, where pages get what weights leave; 0: they have a fixed share.
        due: Whether the begin of its next step is scheduled.
        lanes: Lanes of its steps.
        stepping: By lane, when its running step ends (ns).
        debt: Time that other work on the device has taken from its running step, in ns: the lane of stand-ins, and
            attention for other devices.
        attending: When it has attended to all lent tokens that it was asked for, in ns.
        between: The same for what it was asked for between its steps.
        attended: Time of attention for other devices, in ns.
        loader: Loads its stages.
        host_kv: Bytes of K and V in host memory.
        copies: When its link to host memory is free for K and V, each way, in ns: out, and back.
        busy: Time in steps, in ns.
        life: Incarnation of the device; events of earlier ones are dropped.
    """

    agent: Agent
    engine: SimEngine
    loader: Loader
    weights: int
    budget: int = 0
    alive: bool = True
    due: bool = False
    lanes: tuple[Lane, ...] = ("all",)
    stepping: dict[Lane, int] = field(default_factory=dict)
    debt: int = 0
    busy: int = 0
    steps: int = 0
    life: int = 0
    host_kv: int = 0
    copies: list[int] = field(default_factory=lambda: [0, 0])
    attending: int = 0
    between: int = 0
    attended: int = 0

    def begin_step(self, lane: Lane, busy: int, now: int) -> None:
        """Count a step of a lane that begins now.

        Both lanes share one device: stand-ins run first, and their time is added to the step beside them. So is that
        of attention for other devices.
        """
        self.busy += busy
        self.steps += 1
        if lane == "ahead" and "real" in self.stepping:
            self.debt += busy
        elif lane == "real":
            self.debt += max(0, self.stepping.get("ahead", now) - now)
        self.debt += max(0, self.between - now)
        self.between = 0
        self.stepping[lane] = now + busy

    def attend(self, ns: int, now: int) -> int:
        """Attend to lent tokens beside the step under way, which ends later by as much; return when that is over."""
        self.attending = max(self.attending, now) + ns
        self.attended += ns
        if self.stepping:
            self.debt += ns
        else:
            self.between = max(self.between, now) + ns
        return self.attending

    def copy(self, back: bool, nbytes: int, now: int) -> tuple[int, int]:
        """Occupy the device's link with K and V that go to host memory or come `back`; return begin and time in ns."""
        link, way = self.loader.host.server.host, int(back)
        began = max(now, self.copies[way])
        self.copies[way] = began + link.busy_ns(nbytes)
        return began, self.copies[way] - began + link.latency


@dataclass(frozen=True, slots=True)
class Periods:
    """Periods of timed events, in ns of virtual time; 0: never.

    Fields:
        tick: Between two ticks of the scheduler.
        report: Between two reports of a device.
    """

    tick: int = 1_000_000_000
    report: int = 1_000_000_000

    def __post_init__(self) -> None:
        if min(self.tick, self.report) < 0:
            raise ValueError("a pace is a time, or 0")


@dataclass(slots=True)
class Cost:
    """Processor time of the scheduler, in real time.

    Fields:
        calls: Calls of the scheduler.
        seconds: Time in them.
        slowest: Time of the slowest call, in seconds.
        by_event: Calls by type of event.
    """

    calls: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    by_event: dict[str, int] = field(default_factory=dict)
