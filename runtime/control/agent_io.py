"""What an agent asks its driver to do (commands), and what the driver tells it beside messages (events).

The driver carries commands out in order, calls `handle` with each event, and carries out what comes back
(`agent.agent`): handle(message or event, arrays, now), next_step(now), finish_step, fail_step. Times are integer
nanoseconds of the driver's clock.
What there is many of is a msgspec Struct: cheaper to make than a dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from runtime.chains import Array, Stage
from runtime.messages import Message
from runtime.types import ModelSpec, StepPlan


class Send(msgspec.Struct, frozen=True, gc=False):
    """To a device, or to SCHEDULER. Messages from one sender to one receiver arrive in order, or not at all (it is
    dead).
    """

    to: str
    message: Message
    arrays: tuple[Array, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadStage:
    """For an agent's driver: load it into the engine, then tell StageLoaded or StageFailed."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class DropStage:
    stage: Stage


@dataclass(frozen=True, slots=True)
class ReadPages:
    """For an agent's driver: read pages, put their digest into `message` (a `messages.Pages`, whose digest is empty) and
    send both.
    """

    pages: tuple[int, ...]
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class WritePages:
    """For an agent's driver: verify an array by its digest and put it into pages, then tell PagesWritten."""

    pages: tuple[int, ...]
    data: Array
    digest: str
    move: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class SendActivations:
    """For an agent's driver: join rows [first, last) of these arrays, put their digest into `message` (a
    `messages.Pages`), send both.
    """

    pieces: tuple[tuple[Array, int, int], ...]
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class VerifyActivations:
    """For an agent's driver: verify an array by its digest, then tell ActivationsVerified."""

    data: Array
    digest: str
    move: int
    lo: int
    hi: int


AgentCommand = Send | LoadStage | DropStage | ReadPages | WritePages | SendActivations | VerifyActivations


@dataclass(frozen=True, slots=True)
class StageStep:
    """A step for a stage engine. `inputs`: hidden states by row's name. `strides`: rows that decode several tokens at
    once (simulated engines only).
    """

    plan: StepPlan
    inputs: Mapping[str, Array]
    strides: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StageLoaded:
    """To an agent. `nbytes`: of all weights on the device, now."""

    stage: Stage
    spec: ModelSpec
    nbytes: int


@dataclass(frozen=True, slots=True)
class StageFailed:
    stage: Stage
    reason: str


@dataclass(frozen=True, slots=True)
class PagesWritten:
    """To an agent. `error`: why they could not be, empty if they were."""

    move: int
    lo: int
    hi: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class ActivationsVerified:
    """To an agent. `error`: why they cannot be taken, empty if they can."""

    move: int
    lo: int
    hi: int
    error: str = ""


AgentEvent = StageLoaded | StageFailed | PagesWritten | ActivationsVerified
