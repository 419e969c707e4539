"""Define an agent's commands to its driver, and the driver's events to the agent.

The driver calls `handle` with each message or event and carries out the returned commands in order (`agent.agent`):
handle(message or event, arrays, now), next_step(now), finish_step, fail_step. Times are integer nanoseconds of the
driver's clock. Frequent types are msgspec Structs, which are cheaper to create than dataclasses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from runtime.chains import Array, LoadedUnits, Stage
from runtime.messages import Message
from runtime.types import ModelSpec, Opened, StepPlan


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send a message to a device or to SCHEDULER.

    Messages from one sender to one receiver arrive in order, or not at all, if the receiver is dead.
    """

    to: str
    message: Message
    arrays: tuple[Array, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadStage:
    """Load a stage into the engine. The driver reports StageLoaded or StageFailed."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class ReadStagesAhead:
    """Read the weights of these stages into host memory, in this order, as far as they fit, while nothing is loaded.

    It takes the place of the one before. The driver reports StageRead for each stage that is there.
    """

    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class DropStage:
    """Unload a stage from the engine; `coming` are loaded in its place."""

    stage: Stage
    coming: tuple[Stage, ...] = ()


@dataclass(frozen=True, slots=True)
class ReturnPages:
    """Give the memory of free pages back to the system; they are zero when they are used again."""

    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadPages:
    """Read pages and send them with `message`, a `messages.PageData` into which the driver puts their digest."""

    pages: tuple[int, ...]
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class WritePages:
    """Verify an array by its digest and write it into pages. The driver reports PagesWritten.

    Fields:
        move: Number of the migration.
        lo, hi: Token range of the pages.
        layers: Attention layers [first, last) of the chain that they belong to.
    """

    pages: tuple[int, ...]
    data: Array
    digest: str
    move: int
    lo: int
    hi: int
    layers: tuple[int, int]


@dataclass(frozen=True, slots=True)
class SendActivations:
    """Join rows [first, last) of these arrays and send them with `message`, a `messages.PageData`.

    The driver puts their digest into the message.
    """

    pieces: tuple[tuple[Array, int, int], ...]
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class VerifyActivations:
    """Verify an array by its digest. The driver reports ActivationsVerified."""

    data: Array
    digest: str
    move: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class HoldLoan:
    """Attend for another device, the debtor, to these page sets from now on; they hold so many tokens (IL-04).

    `first_layer`: the loan's first layer, counted from the first one of the debtor's hop.
    """

    loan: int
    groups: tuple[tuple[int, ...], ...]
    tokens: int
    debtor: str
    first_layer: int = 0


@dataclass(frozen=True, slots=True)
class DropLoan:
    """Attend to a loan no more: its pages are free."""

    loan: int


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Copy K and V of a page table's first `tokens` tokens, in these pages, to host memory (QL-10).

    The driver reports CopiedOut.
    """

    key: str
    tokens: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Write pages with what CopyOut brought (QL-10). The driver reports CopiedIn.

    Fields:
        opened: The sequence, under the key of its page table.
        tokens: Tokens with K and V, in these pages and in those before that it shares.
    """

    opened: Opened
    tokens: int
    pages: tuple[int, ...]
    data: Array

    @property
    def key(self) -> str:
        return self.opened.request.seq


@dataclass(frozen=True, slots=True)
class ShareHostMemory:
    """Leave weights that wait what K and V do not take of the host memory.

    `change`: bytes by which K and V there grow or shrink. (A total could be out of date when it is carried out: events
    of commands before it change it.)
    """

    change: int


AgentCommand = (
    Send
    | LoadStage
    | ReadStagesAhead
    | DropStage
    | ReturnPages
    | ReadPages
    | WritePages
    | SendActivations
    | VerifyActivations
    | HoldLoan
    | DropLoan
    | CopyOut
    | CopyIn
    | ShareHostMemory
)


@dataclass(frozen=True, slots=True)
class StageStep:
    """Hold a step for a stage engine.

    Fields:
        inputs: Hidden states by row name.
        strides: Rows that decode several tokens at once, with their number (simulated engines only).
    """

    plan: StepPlan
    inputs: Mapping[str, Array]
    strides: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StageLoaded:
    """Report to the agent that a stage is loaded.

    Fields:
        nbytes: Bytes of all weights on the device now.
        brought: What the load brought; None if the engine does not say.
        host: As `HostChanged.units`.
    """

    stage: Stage
    spec: ModelSpec
    nbytes: int
    brought: LoadedUnits | None = None
    host: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostChanged:
    """Report to the agent that stages were dropped.

    Fields:
        dropped: Their ids.
        units: Bytes that host memory has now of units that came to it or left it, by digest.
    """

    dropped: tuple[str, ...]
    units: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StageRead:
    """Report to the agent that host memory or the device has the weights of a stage that was to be read ahead.

    Fields:
        stage: Its id.
        units: Digest of the weights of each of its components, in order.
        host: As `HostChanged.units`.
    """

    stage: str
    units: tuple[str, ...]
    host: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageFailed:
    """Report to the agent that a stage could not be loaded."""

    stage: Stage
    reason: str


@dataclass(frozen=True, slots=True)
class PagesWritten:
    """Report to the agent that pages are written, or the `error` that prevented it (empty if none).

    The other fields are those of WritePages.
    """

    move: int
    lo: int
    hi: int
    layers: tuple[int, int]
    error: str = ""


@dataclass(frozen=True, slots=True)
class ActivationsVerified:
    """Report to the agent that hidden states match their digest, or the `error` (empty if none)."""

    move: int
    lo: int
    hi: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class CopiedOut:
    """Report to the agent that pages are in host memory, or the `error` that prevented it. `took`: in ns."""

    key: str
    data: Array | None
    took: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class CopiedIn:
    """Report to the agent that pages are written, or the `error` that prevented it. `took`: in ns."""

    key: str
    took: int
    error: str = ""


AgentEvent = (
    StageLoaded | StageRead | StageFailed | HostChanged | PagesWritten | ActivationsVerified | CopiedOut | CopiedIn
)
