"""What the scheduler asks its driver to do (commands), and what the driver tells it beside messages (events).

The driver carries commands out in order and calls handle(message or event, now) with whatever happened. Times are
integer nanoseconds of the driver's clock. What there is many of is a msgspec Struct: cheaper to make than a dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from runtime.chains import Block, Chain, Variant
from runtime.control.agent_io import Send
from runtime.policy.profiles import BlockProfile
from runtime.types import SequenceRequest, TokenEvent


class EmitTokens(msgspec.Struct, frozen=True, gc=False):
    """For the scheduler's driver: tokens and ends for whoever asked, in order."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class ReplaceAgent:
    """For the scheduler's driver: a device is gone; bring another agent up in its place, if there can be one."""

    device: str


@dataclass(frozen=True, slots=True)
class ModelUpdated:
    """For the scheduler's driver: what became of a ServeModel or WithdrawModel. `version`: the one that new
    sequences get from now on, empty for none;
    `error`: why it is not the one that was asked for, empty if it is.
    """

    model: str
    version: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class MoveAnswered:
    """For the scheduler's driver: what became of a MoveSequence. `error`: why it cannot be, empty if it has begun."""

    seq: str
    error: str = ""


SchedulerCommand = Send | EmitTokens | ReplaceAgent | ModelUpdated | MoveAnswered


class AddRequest(msgspec.Struct, frozen=True, gc=False):
    """To the scheduler."""

    request: SequenceRequest


class AddRequests(msgspec.Struct, frozen=True, gc=False):
    """Several at once, in the order of their coming: what follows is said once for all of them."""

    requests: tuple[SequenceRequest, ...]


@dataclass(frozen=True, slots=True)
class AbortSequence:
    seq: str


@dataclass(frozen=True, slots=True)
class PauseSequence:
    """To the scheduler: a sequence waits for somebody else (a tool, a person). `expected`: for how many ns, None where
    nobody knows.
    """

    seq: str
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class ResumeSequence:
    """It goes on."""

    seq: str


@dataclass(frozen=True, slots=True)
class MoveSequence:
    """To the scheduler: blocks [lo, hi) of a running sequence's chain are to go to another device. Answered by one
    MoveAnswered, at once.
    """

    seq: str
    lo: int
    hi: int
    target: str


@dataclass(frozen=True, slots=True)
class AgentDown:
    """To the scheduler: an agent's process ended, or it has not been heard of for too long. `final`: no other takes its
    place; `planned`: it was told to end, so that is the fault of nobody who ran there."""

    device: str
    reason: str
    final: bool = False
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """To the scheduler, once per period: what is due by time alone."""


@dataclass(frozen=True, slots=True)
class ServeModel:
    """To the scheduler: a new model, or a new version of one: the same name, another `Chain.version` and
    `Chain.loaded_as`. Answered by one ModelUpdated, when new sequences get it or when it is clear that they will not.
    `blocks`: at least those that are not known yet.
    `profiles`: of those that were measured.
    """

    chain: Chain
    blocks: tuple[Block, ...]
    variants: tuple[Variant, ...] = ()
    profiles: tuple[BlockProfile, ...] = ()


@dataclass(frozen=True, slots=True)
class WithdrawModel:
    """To the scheduler: new sequences are refused; whoever is there finishes. Answered by one ModelUpdated."""

    model: str


SchedulerEvent = (
    AddRequest
    | AddRequests
    | AbortSequence
    | PauseSequence
    | ResumeSequence
    | MoveSequence
    | AgentDown
    | Tick
    | ServeModel
    | WithdrawModel
)
