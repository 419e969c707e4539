"""Define the scheduler's interface to its agents: `RemoteAgents` for any number, `InlineAgent` for one on
its thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from runtime.cluster.agents.lifecycle import AgentLifecycles
from runtime.control.scheduler_io import AgentDown
from runtime.messages import AgentStats, Message

#: An event for the scheduler.
Told = Message | AgentDown


@dataclass(frozen=True, slots=True)
class AgentWork:
    """Work that agents have reported since the driver started.

    Fields:
        steps: Steps run.
        busy: Time in steps, in ns.
        segments: Segments run.
        idle: Tokens computed as padding.
    """

    steps: int = 0
    busy: int = 0
    segments: int = 0
    idle: int = 0


class AgentPool(Protocol):
    """The agents of a cluster, used by the scheduler's thread.

    `receive` and `look` return events for the scheduler in order; for each device that is gone there is an AgentDown.
    `receive` may work and wait; `look` and `send` may not, because a lock is held. All methods except `wake` and `work`
    are called on the scheduler's thread.

    `reports`: the latest AgentStats of each agent that is up. `page_bytes`: bytes of a page, 0 before the first agent
    is up.
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
        """Return what happened; wait up to `timeout` seconds for the first event."""
        ...

    def look(self) -> list[Told]:
        """Carry out what is due by time; return the resulting events."""
        ...

    def send(self, device: str, message: Message) -> None:
        """Send a message to an agent. One that is gone is ignored: the scheduler receives its AgentDown."""
        ...

    def restart(self, device: str) -> None:
        """Replace a device's agent after its running step."""
        ...

    def work(self) -> AgentWork:
        """Return the work of all agents so far. From any thread that holds the lock."""
        ...

    def close(self, patience: float) -> None:
        """End all agents, by force after `patience` seconds, and release everything."""
        ...
