"""How agents come up and end: what a driver needs of subprocesses, threads or Ray's actors. Which ones, when, how
often: see `lives`.

Contract of a AgentLauncher: `start` and `kill` return at once. Whatever starts ends in exactly one call of the
listener, from any thread, however it ends. A fleet knows where the scheduler is to listen, because it is what tells its
agents.
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
    """An agent has ended. `code`: of its process, negative for a signal, None without one. `reason`: its own word, or
    the code's.
    """

    device: str
    incarnation: int
    code: int | None
    reason: str

    @property
    def final(self) -> bool:
        """Whether another one would end the same way: it was refused, as one of another version is."""
        return self.code == AgentExit.DENIED


@dataclass(frozen=True, slots=True)
class AgentSlot:
    """Where the scheduler listens. `context`: shared with agents that are threads of this process."""

    bind: str
    keys: Keys | None = None
    context: zmq.Context[zmq.Socket[bytes]] | None = None


class AgentLauncher(Protocol):
    @property
    def seat(self) -> AgentSlot: ...

    def attach(self, listener: Callable[[AgentDied], None], scheduler: str) -> None:
        """Before anything starts: who hears of ends, and the address that the scheduler has got."""
        ...

    def start(self, device: str, incarnation: int) -> None: ...

    def kill(self, device: str, incarnation: int) -> None:
        """At once, whatever it does. One that has ended is nothing to do."""
        ...

    def shutdown(self, timeout: float) -> None:
        """Wait for all to end, kill those that have not after `timeout` seconds, let everything go."""
        ...
