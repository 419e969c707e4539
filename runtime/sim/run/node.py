"""What a simulation keeps of each device, how often things happen by the clock, and what deciding took.

Knows nothing of how it is driven.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.agent.agent import Agent
from runtime.agent.steps.queue import Lane
from runtime.sim.run.engine import SimEngine


@dataclass(slots=True)
class Node:
    """One device. `lanes`: of its steps; `due`: their next begin is scheduled; `stepping`: until when a step of each is
    under way.
    `debt`: ns that the lane of stand-ins has taken from the step under way in the other one. `loader_free`: when its
    loader is free."""

    agent: Agent
    engine: SimEngine
    weights: int
    alive: bool = True
    due: bool = False
    lanes: tuple[Lane, ...] = ("all",)
    stepping: dict[Lane, int] = field(default_factory=dict)
    debt: int = 0
    loader_free: int = 0
    busy: int = 0
    steps: int = 0
    life: int = 0


@dataclass(frozen=True, slots=True)
class Periods:
    """Nanoseconds of virtual time. `tick`: between two ticks of the scheduler; `report`: between two reports of a
    device; 0 for none.
    """

    tick: int = 1_000_000_000
    report: int = 1_000_000_000

    def __post_init__(self) -> None:
        if min(self.tick, self.report) < 0:
            raise ValueError("a pace is a time, or 0")


@dataclass(slots=True)
class Cost:
    """What deciding took in real time, outside of the virtual one: calls of the scheduler, and seconds of the processor
    in them.
    """

    calls: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    by_event: dict[str, int] = field(default_factory=dict)
