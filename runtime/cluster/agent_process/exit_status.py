"""How agents end, in a thread, a process or an actor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class AgentExit(IntEnum):
    """Exit codes of agent processes."""

    STOPPED = 0
    DEFECT = 1
    DENIED = 3
    LOST = 4
    UNANSWERED = 5
    ORPHANED = 6


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """How an agent's loop ended. `reason` may be shown to clients."""

    code: AgentExit
    reason: str
