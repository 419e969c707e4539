"""Define the sequences on one device and the rows that wait or run there.

An `AgentSequence` is a sequence under one epoch and path. It has one page table per stage that it passes on this
device. Keys of tables are never reused, so a step may still write a table that was closed meanwhile. A `QueuedRow` is
the work of one hop: one sequence's tokens in one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from runtime.agent.sequences.prompt_states import EnteringPrompt, SavingPrompt
from runtime.chains import Array, Path, RunAhead, Slice
from runtime.types import ModelSpec, PromptLogprobs, Sampled, SequenceRequest


@dataclass(slots=True)
class AgentSequence:
    """A sequence on one device, under one epoch.

    Fields:
        output: Tokens that it had produced when it was opened here.
        keys: Key of its page table, by the first component of the stage.
        ahead: The hop of its path that is predicted.
        shadow: Key of the stand-in's page table, if the stand-in is on this device.
        prediction: The latest prediction: (attempt, hidden states).
        latest: By hop: (attempt, start) of the latest row that arrived.
        again: By hop: (attempt, start) of the latest row that began at or before the start of an earlier one.
        stages: Id of the stage, by its first component.
        offers: By hop behind this device: the devices that it is offered to (BL-23).
        here: False once the sequence is closed, or opened again under a newer epoch.
        scores: Log-probabilities of its prompt, from the parts that ran of a divided row.
        entry: The first tokens of its prompt that enter inside the stage, until they have run (UN-15).
        saving: What is to be saved of its prompt (UN-15).

    `latest` and `again` are kept by hop, because a path may pass a device more than once: the real row at one hop must
    not supersede its own prediction at a later hop.
    """

    request: SequenceRequest
    epoch: int
    path: Path
    output: tuple[int, ...]
    keys: dict[int, str] = field(default_factory=dict)
    ahead: RunAhead | None = None
    shadow: str | None = None
    prediction: tuple[int, Array] | None = None
    latest: dict[int, tuple[int, int]] = field(default_factory=dict)
    again: dict[int, tuple[int, int]] = field(default_factory=dict)
    stages: dict[int, str] = field(default_factory=dict)
    offers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    here: bool = True
    scores: list[PromptLogprobs] = field(default_factory=list)
    entry: EnteringPrompt | None = None
    saving: SavingPrompt | None = None
    seq: str = field(init=False)

    def __post_init__(self) -> None:
        self.seq = self.request.seq

    def comes(self, hop: int, attempt: int, start: int) -> None:
        """Record a row that arrived.

        If it begins at or before the start of the latest row at this hop, it supersedes that row.
        """
        known = self.latest.get(hop)
        if known is None or attempt > known[0]:
            if known is not None and start <= known[1]:
                self.again[hop] = attempt, start
            self.latest[hop] = attempt, start

    def superseded(self, hop: int, attempt: int, start: int) -> bool:
        """Return whether a row must not run any more, because a later one begins at or before its start."""
        again = self.again.get(hop)
        return again is not None and attempt < again[0] and start >= again[1]


@dataclass(slots=True)
class Credit:
    """Tokens that a sequence may decode on its device before the device reports to the scheduler.

    Fields:
        until: Number of produced tokens at which the credit is used up.
        ends: Token ids that end it once `least` tokens are produced.
        told: Tokens sampled on this credit so far.
        over: True once it is used up or cancelled; later rows of it are dropped.
    """

    until: int
    ends: frozenset[int]
    least: int
    told: list[Sampled] = field(default_factory=list)
    over: bool = False

    def add_token(self, sampled: Sampled, made: int) -> bool:
        """Record a token, the `made`-th one produced; return whether more tokens may follow on this credit."""
        self.told.append(sampled)
        self.over = made >= self.until or (made >= self.least and sampled.token in self.ends)
        return not self.over


class QueuedRow(msgspec.Struct, eq=False, gc=False):
    """A row that waits for a step or runs in one: `tokens` tokens of a sequence from position `start` on.

    Fields:
        hop: Index in the sequence's path.
        name: Key of its page table.
        stage: Id of its stage.
        ids: Token ids, if the stage begins with the embedding; else None.
        array: Hidden states, if the stage does not begin with the embedding; else None.
        sample: Whether a token is sampled behind the last position.
        generated: Tokens produced so far.
        steps: Tokens to decode in this step (more than 1 only with simulated engines).
        since: When it began to wait, in ns.
        holds: Whether K and V of its sequence are on this device already.
        move: The migration that recomputes pages with this row; 0 for a row of a sequence.
        attempt: Number of a speculated row, as in `RunRows.attempts`; 0 without speculation.
        ahead: Whether its predicted hop may run ahead, as in `RunRows.speculate`.
        shadow: True if it runs the stand-in.
        before: Tokens of the same order that ran in earlier parts of this row.
        part: True if the rest of its tokens waits behind it.
        credit: The credit that it is decoded on.
        awaits: Number of the step that samples its token, while that is not known yet; else 0.
        layers: Attention layers that it passes, as in `types.Row`.
    """

    sequence: AgentSequence
    epoch: int
    hop: int
    name: str
    stage: str
    start: int
    tokens: int
    ids: tuple[int, ...] | None
    array: Array | Slice | None
    sample: bool
    generated: int
    steps: int
    since: int
    holds: bool
    move: int = 0
    attempt: int = 0
    ahead: bool = False
    shadow: bool = False
    before: int = 0
    part: bool = False
    credit: Credit | None = None
    awaits: int = 0
    layers: int = 0

    @property
    def divisible(self) -> bool:
        """Whether a part of its tokens may run in an earlier step.

        Only rows with a single hop: the scheduler alone receives their result, and only after the last part.
        """
        return (
            self.ids is not None
            and self.tokens > 1
            and not self.move
            and not self.attempt
            and len(self.sequence.path) == 1
        )

    @property
    def enters(self) -> int:
        """Component of the stage at which it enters with saved hidden states; 0 for its first one."""
        entry = self.sequence.entry
        return entry.at if entry is not None and self.start < entry.tokens and not self.move else 0

    @property
    def saves(self) -> tuple[int, ...]:
        """Components of the stage of which the input is to be saved."""
        saving = self.sequence.saving
        return () if saving is None or self.move else saving.wanted(self.start, self.tokens, self.enters)

    @property
    def forecasts(self) -> bool:
        """Whether the answer's length may be forecast from its last token: it samples, and the length is not given."""
        sampling = self.sequence.request.sampling
        given = sampling.ignore_eos and not sampling.stop_token_ids
        return self.sample and not self.move and not self.shadow and not given

    @property
    def work(self) -> int:
        """Number of tokens for which it writes K and V."""
        return self.tokens + self.steps - 1


def credit_of(request: SequenceRequest, spec: ModelSpec, until: int) -> Credit:
    """Return the credit of a sequence that may decode until it has produced `until` tokens."""
    sampling = request.sampling
    ends = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else spec.eos_token_ids))
    return Credit(until, ends, sampling.min_tokens)


def following(row: QueuedRow, step: int, now: int) -> QueuedRow:
    """Return the next row on the same credit; step number `step` samples its token (0: the caller fills it in)."""
    return QueuedRow(
        row.sequence,
        row.epoch,
        row.hop,
        row.name,
        row.stage,
        row.start + 1,
        1,
        (0,),
        None,
        row.sample,
        row.generated + 1,
        1,
        now,
        True,
        credit=row.credit,
        awaits=step,
    )


def first_part(row: QueuedRow, count: int, now: int) -> QueuedRow:
    """Cut the first `count` tokens off a divisible row and return them as a row of their own.

    `row` keeps the remaining tokens and waits again from `now`.
    """
    ids = row.ids or ()
    part = replace(row, tokens=count, ids=ids[:count], sample=False, part=True)
    row.start += count
    row.tokens -= count
    row.before += count
    row.ids, row.holds, row.since = ids[count:], True, now
    return part


def joined(part: QueuedRow, rest: QueuedRow) -> QueuedRow:
    """Undo `first_part` for a part that did not run; return the whole row."""
    rest.start, rest.tokens, rest.before = part.start, part.tokens + rest.tokens, part.before
    rest.ids, rest.holds = (*(part.ids or ()), *(rest.ids or ())), part.holds
    return rest
