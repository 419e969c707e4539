"""Define launchers, which start and end agents as processes, threads or Ray actors.

When and how often agents are started is decided by `agents.lifecycle`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq

from runtime.cluster.agent_process.exit_status import AgentExit
from runtime.transport.keys import Keys


@dataclass(frozen=True, slots=True)
class AgentDied:
    """An agent has ended.

    Fields:
        code: Exit code of its process, negative for a signal; None without a process.
        reason: As the agent gave it, or the meaning of the code.
    """

    device: str
    incarnation: int
    code: int | None
    reason: str

    @property
    def final(self) -> bool:
        """Whether another agent would end the same way: it was refused, for example for its version."""
        return self.code == AgentExit.DENIED


@dataclass(frozen=True, slots=True)
class AgentSlot:
    """Where the scheduler listens. `context`: shared with agents that are threads of this process."""

    bind: str
    keys: Keys | None = None
    context: zmq.Context[zmq.Socket[bytes]] | None = None


class AgentLauncher(Protocol):
    """Starts and ends agents.

    `start` and `kill` return at once. Every start ends in exactly one call of the listener, from any thread, however
    the agent ends. The launcher determines where the scheduler listens (`seat`), because it passes that address to its
    agents.
    """

    @property
    def seat(self) -> AgentSlot: ...

    def attach(self, listener: Callable[[AgentDied], None], scheduler: str) -> None:
        """Set the listener for ended agents and the scheduler's actual address. Call before `start`."""
        ...

    def start(self, device: str, incarnation: int) -> None: ...

    def kill(self, device: str, incarnation: int) -> None:
        """Kill an agent at once. One that has ended is ignored."""
        ...

    def shutdown(self, timeout: float) -> None:
        """Wait for all agents to end, kill the rest after `timeout` seconds, and release everything."""
        ...
