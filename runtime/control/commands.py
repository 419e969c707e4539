"""What the state machines of a cluster ask their drivers to do, and what drivers tell them beside messages. Plan as data, then apply.

A driver carries commands out in order. It calls `handle` with whatever happened, and carries out what comes back:

    Relay      (one per device, `agent.agent`)      handle(message or event, arrays, now), next_step(now), finish_step, fail_step
    Scheduler  (one per cluster)                    handle(message or event, now)

Times are integer nanoseconds of the driver's clock. What there is many of is a msgspec Struct: cheaper to make than a dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from runtime.chains import Array, Block, Chain, Stage, Variant
from runtime.messages import Message
from runtime.policy.profiles import BlockProfile
from runtime.types import ModelSpec, SequenceRequest, StepPlan, TokenEvent

#: The scheduler's name where a device's could stand.
SCHEDULER = "scheduler"


# -- commands ----------------------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True, gc=False):
    """To a device, or to SCHEDULER. Messages from one sender to one receiver arrive in order, or not at all (it is dead)."""

    to: str
    message: Message
    arrays: tuple[Array, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadStage:
    """For a relay's driver: load it into the engine, then tell StageLoaded or StageFailed."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class DropStage:
    stage: Stage


@dataclass(frozen=True, slots=True)
class ReadPages:
    """For a relay's driver: read pages, put their digest into `message` (a `messages.Pages`, whose digest is empty) and send both."""

    pages: tuple[int, ...]
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class WritePages:
    """For a relay's driver: verify an array by its digest and put it into pages, then tell PagesWritten."""

    pages: tuple[int, ...]
    data: Array
    digest: str
    move: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class SendInputs:
    """For a relay's driver: join rows [first, last) of these arrays, put their digest into `message` (a `messages.Pages`), send both."""

    pieces: tuple[tuple[Array, int, int], ...]
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class CheckInputs:
    """For a relay's driver: verify an array by its digest, then tell InputsChecked."""

    data: Array
    digest: str
    move: int
    lo: int
    hi: int


class Emit(msgspec.Struct, frozen=True, gc=False):
    """For the scheduler's driver: tokens and ends for whoever asked, in order."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class Replace:
    """For the scheduler's driver: a device is gone; bring another agent up in its place, if there can be one."""

    device: str


@dataclass(frozen=True, slots=True)
class Updated:
    """For the scheduler's driver: what became of a Serve or Withdraw. `version`: the one that newcomers get from now on, empty for none;
    `error`: why it is not the one that was asked for, empty if it is.
    """

    model: str
    version: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Moving:
    """For the scheduler's driver: what became of a Move. `error`: why it cannot be, empty if it has begun."""

    seq: str
    error: str = ""


RelayCommand = Send | LoadStage | DropStage | ReadPages | WritePages | SendInputs | CheckInputs
SchedulerCommand = Send | Emit | Replace | Updated | Moving


@dataclass(frozen=True, slots=True)
class StageStep:
    """A step for a stage engine. `inputs`: hidden states by row's name. `strides`: rows that decode several tokens at once (simulated
    engines only).
    """

    plan: StepPlan
    inputs: Mapping[str, Array]
    strides: Mapping[str, int]


# -- events beside messages --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageLoaded:
    """To a relay. `nbytes`: of all weights on the device, now."""

    stage: Stage
    spec: ModelSpec
    nbytes: int


@dataclass(frozen=True, slots=True)
class StageFailed:
    stage: Stage
    reason: str


@dataclass(frozen=True, slots=True)
class PagesWritten:
    """To a relay. `error`: why they could not be, empty if they were."""

    move: int
    lo: int
    hi: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class InputsChecked:
    """To a relay. `error`: why they cannot be taken, empty if they can."""

    move: int
    lo: int
    hi: int
    error: str = ""


class Arrive(msgspec.Struct, frozen=True, gc=False):
    """To the scheduler."""

    request: SequenceRequest


class ArriveTogether(msgspec.Struct, frozen=True, gc=False):
    """Several at once, in the order of their coming: what follows is said once for all of them."""

    requests: tuple[SequenceRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    seq: str


@dataclass(frozen=True, slots=True)
class Pause:
    """To the scheduler: a sequence waits for somebody else (a tool, a person). `expected`: for how many ns, None where nobody knows."""

    seq: str
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """It goes on."""

    seq: str


@dataclass(frozen=True, slots=True)
class Move:
    """To the scheduler: blocks [lo, hi) of a running sequence's chain are to go to another device. Answered by one Moving, at once."""

    seq: str
    lo: int
    hi: int
    target: str


@dataclass(frozen=True, slots=True)
class Down:
    """To the scheduler: an agent's process ended, or it has not been heard of for too long. `final`: no other takes its place; `planned`:
    it was told to end, so that is the fault of nobody who ran there."""

    device: str
    reason: str
    final: bool = False
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """To the scheduler, once per period: what is due by time alone."""


@dataclass(frozen=True, slots=True)
class Serve:
    """To the scheduler: a new model, or a new version of one: the same name, another `Chain.version` and `Chain.loaded_as`. Answered by
    one Updated, when newcomers get it or when it is clear that they will not. `blocks`: at least those that are not known yet.
    `profiles`: of those that were measured.
    """

    chain: Chain
    blocks: tuple[Block, ...]
    variants: tuple[Variant, ...] = ()
    profiles: tuple[BlockProfile, ...] = ()


@dataclass(frozen=True, slots=True)
class Withdraw:
    """To the scheduler: newcomers are refused; whoever is there finishes. Answered by one Updated."""

    model: str


RelayEvent = StageLoaded | StageFailed | PagesWritten | InputsChecked
SchedulerEvent = Arrive | ArriveTogether | Abort | Pause | Resume | Move | Down | Tick | Serve | Withdraw
