"""A cluster's agents, as its scheduler's thread speaks with them: `company.Company` of any number, or `alone.Alone` of
one, on this thread.

Contract: one thread, but for `wake`. What `receive` and `look` give is what the scheduler is to be told, in order;
where a device is gone a AgentDown is among it. `receive` may work and wait, `look` and `send` may not: a lock is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from runtime.cluster.agents.lifecycle import AgentLifecycles
from runtime.control.scheduler_io import AgentDown
from runtime.messages import AgentStats, Message

#: What the scheduler hears.
Told = Message | AgentDown


@dataclass(frozen=True, slots=True)
class AgentWork:
    """What agents have done since the driver began, as far as they have told: steps, nanoseconds in them (`busy`),
    segments that ran, and tokens computed for nobody."""

    steps: int = 0
    busy: int = 0
    segments: int = 0
    idle: int = 0


class AgentPool(Protocol):
    """`reports`: the last of each agent that is up. `page_bytes`: of every agent's pages, 0 before the first is
    there.
    """

    @property
    def lifecycles(self) -> AgentLifecycles: ...

    @property
    def reports(self) -> Mapping[str, AgentStats]: ...

    @property
    def page_bytes(self) -> int: ...

    def wake(self) -> None:
        """End a `receive` that waits. From any thread."""
        ...

    def receive(self, timeout: float) -> list[Told]:
        """What happened; waits for the first of it up to `timeout` seconds."""
        ...

    def look(self) -> list[Told]:
        """What is due by time."""
        ...

    def send(self, device: str, message: Message) -> None:
        """To an agent; one that is gone is nothing to do: the scheduler hears of it."""
        ...

    def restart(self, device: str) -> None:
        """Have another agent take a device's place, behind the step under way."""
        ...

    def work(self) -> AgentWork:
        """Of all agents that there were. From any thread that holds the lock."""
        ...

    def close(self, patience: float) -> None:
        """End all agents, those that take longer than so many seconds by force, and let everything go."""
        ...
