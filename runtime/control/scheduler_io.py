"""Define the scheduler's commands to its driver, and the driver's events to the scheduler.

The driver calls handle(message or event, now) and carries out the returned commands in order. Times are integer
nanoseconds of the driver's clock. Frequent types are msgspec Structs, which are cheaper to create than dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from runtime.chains import Block, Chain, Variant
from runtime.control.agent_io import Send
from runtime.control.pool_io import PoolAnswer, PoolCommand
from runtime.policy.lengths.forecast import LengthForecast
from runtime.policy.profiles import BlockProfile
from runtime.policy.slo.plan.problem import GroupPlan, Problem
from runtime.types import SequenceRequest, TokenEvent

PlanMethod = Literal["search", "paper"]


class EmitTokens(msgspec.Struct, frozen=True, gc=False):
    """Deliver tokens and ends of sequences to their streams, in order."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class ReplaceAgent:
    """Start another agent in place of one that is gone, if possible."""

    device: str


@dataclass(frozen=True, slots=True)
class ModelUpdated:
    """Report the result of a ServeModel or WithdrawModel.

    Fields:
        version: Version that new sequences get from now on; empty for none.
        error: Why it is not the requested one; empty if it is.
    """

    model: str
    version: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class MoveAnswered:
    """Report the result of a MoveSequence. `error`: why the migration cannot start; empty if it has started."""

    seq: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class RolesChanged:
    """Report the result of a SetRoles. `error`: why nothing was changed; empty if the roles are as requested."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class SolvePlan:
    """Solve a planning problem beside the scheduler, and return its PlanSolved.

    Fields:
        number: Number of the plan; there is one under way at a time.
        method: `search`: insertion and annealing; `paper`: the paper's equations.
    """

    number: int
    problem: Problem
    method: PlanMethod


SchedulerCommand = (
    SolvePlan | Send | EmitTokens | ReplaceAgent | ModelUpdated | MoveAnswered | RolesChanged | PoolCommand
)


class AddRequest(msgspec.Struct, frozen=True, gc=False):
    """Add a sequence."""

    request: SequenceRequest


class AddRequests(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Add several sequences in order of arrival. The scheduler reacts once for all of them.

    `forecasts`: what is predicted of the length of each answer, None for no forecast; empty: nothing of any.
    """

    requests: tuple[SequenceRequest, ...]
    forecasts: tuple[LengthForecast | None, ...] = ()


@dataclass(frozen=True, slots=True)
class AbortSequence:
    """End a sequence at its client's request."""

    seq: str


@dataclass(frozen=True, slots=True)
class PauseSequence:
    """Pause a sequence while it waits for a tool or a person.

    Fields:
        expected: Expected length of the pause in ns; None if unknown.
    """

    seq: str
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class ResumeSequence:
    """Resume a paused sequence."""

    seq: str


@dataclass(frozen=True, slots=True)
class MoveSequence:
    """Migrate blocks [lo, hi) of a running sequence's chain to device `target`.

    The scheduler answers with one MoveAnswered at once.
    """

    seq: str
    lo: int
    hi: int
    target: str


@dataclass(frozen=True, slots=True)
class SetRoles:
    """Give devices other roles, all of them or none; pairs of device and role. Answered by one RolesChanged at once."""

    roles: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class AgentDown:
    """Report that an agent's process ended, or that its heartbeats stopped.

    Fields:
        final: No other agent takes its place.
        planned: It was stopped on purpose, so no sequence on it is suspected of having caused the end.
    """

    device: str
    reason: str
    final: bool = False
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Signal that a period has passed, so that the scheduler runs what is due by time alone."""


@dataclass(frozen=True, slots=True)
class ServeModel:
    """Serve a new model, or a new version of one: the same name with another `Chain.version` and `Chain.loaded_as`.

    The scheduler answers with one ModelUpdated, when new sequences get the version or when it is clear that they will
    not.

    Fields:
        blocks: The chain's blocks, at least those that the scheduler does not have yet.
        profiles: Profiles of those blocks that were measured.
    """

    chain: Chain
    blocks: tuple[Block, ...]
    variants: tuple[Variant, ...] = ()
    profiles: tuple[BlockProfile, ...] = ()


@dataclass(frozen=True, slots=True)
class WithdrawModel:
    """Refuse new sequences of a model; running ones finish. The scheduler answers with one ModelUpdated."""

    model: str


@dataclass(frozen=True, slots=True)
class PlanSolved:
    """Report the outcome of a SolvePlan.

    Fields:
        plan: None where there is none.
        why: Why not.
        took_ns: Time that it took.
    """

    number: int
    plan: GroupPlan | None
    why: str
    took_ns: int


@dataclass(frozen=True, slots=True)
class ExpectRequest:
    """Announce a request of a client that is being prepared: its sequences follow in a moment.

    Fields:
        comes: False: it was announced, and is refused.
    """

    request: str
    comes: bool = True


@dataclass(frozen=True, slots=True)
class LengthPredicted:
    """Report how long the answer of a sequence is predicted to get (TI-10)."""

    seq: str
    forecast: LengthForecast


SchedulerEvent = (
    AddRequest
    | AddRequests
    | AbortSequence
    | PauseSequence
    | ResumeSequence
    | MoveSequence
    | SetRoles
    | AgentDown
    | Tick
    | ServeModel
    | WithdrawModel
    | PlanSolved
    | LengthPredicted
    | ExpectRequest
    | PoolAnswer
)
