"""Represent the sequences on one device, and their rows that wait there.

Contract: an `AgentSequence` is a sequence under one epoch and path. It has a table of pages per stage that it passes
here, under a key that no other table ever has, so that a step may still write what was closed already. A `QueuedRow` is
one hop's work. Nothing here decides or counts pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from runtime.chains import Array, Path, RunAhead, Slice
from runtime.types import ModelSpec, PromptLogprobs, Sampled, SequenceRequest


@dataclass(slots=True)
class AgentSequence:
    """`keys`: table by the first component of a stage, `stages`: their ids. `output`: tokens it had produced when it
    was opened. `here`: it has neither been closed nor opened anew. `offers`: hops behind this device that are offered,
    and to whom (BL-23). `scores`: of its prompt, from parts of a row that has not run whole yet.

    `ahead`: which of its hops is predicted; `shadow`: the table of what predicts it, if that is here; `prediction`: its
    latest, as turn and
    hidden states. `latest`: by hop, turn and start of the latest row that came; `again`: of the latest that began where
    another had been.
    A path may come back here: the row itself at one hop supersedes nothing of its prediction at a later one.
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
    seq: str = field(init=False)

    def __post_init__(self) -> None:
        self.seq = self.request.seq

    def comes(self, hop: int, attempt: int, start: int) -> None:
        """A row has come. One that begins where, or before where, another began at this hop supersedes that."""
        known = self.latest.get(hop)
        if known is None or attempt > known[0]:
            if known is not None and start <= known[1]:
                self.again[hop] = attempt, start
            self.latest[hop] = attempt, start

    def superseded(self, hop: int, attempt: int, start: int) -> bool:
        """Whether a row is not to be run any more: a later one begins at or before it."""
        again = self.again.get(hop)
        return again is not None and attempt < again[0] and start >= again[1]


@dataclass(slots=True)
class Credit:
    """Tokens that a sequence decodes here before its device reports: until it has produced `until` of them, or one
    of `ends` once it has
    `least`. `told`: those that it got. `over`: no more rows of it count.
    """

    until: int
    ends: frozenset[int]
    least: int
    told: list[Sampled] = field(default_factory=list)
    over: bool = False

    def add_token(self, sampled: Sampled, made: int) -> bool:
        """A token, with which `made` are produced. Whether more are to come."""
        self.told.append(sampled)
        self.over = made >= self.until or (made >= self.least and sampled.token in self.ends)
        return not self.over


class QueuedRow(msgspec.Struct, eq=False, gc=False):
    """A row before, or in, a step: `tokens` of a sequence from `start` on. `name`: of its table. `holds`: K and V of it
    are here already.

    `ids`: the tokens where the stage begins with the embedding, else None and `array` has the hidden states.
    `steps`: tokens to decode.
    `move`: which migration recomputes by it, 0 for the rows of sequences. `attempt`, `ahead`: as in messages.
    `shadow`: it runs the
    surrogate. `before`: tokens of the same order that ran before it; `part`: more of them wait behind it. `credit`:
    what it is decoded on;
    `awaits`: the step that samples its token, where that is not known yet, else 0.
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

    @property
    def divisible(self) -> bool:
        """Whether some of its tokens may run before the others: nobody but the scheduler hears of them, and only when
        all have run.
        """
        return (
            self.ids is not None
            and self.tokens > 1
            and not self.move
            and not self.attempt
            and len(self.sequence.path) == 1
        )

    @property
    def work(self) -> int:
        """Tokens whose K and V are written by it."""
        return self.tokens + self.steps - 1


def credit_of(request: SequenceRequest, spec: ModelSpec, until: int) -> Credit:
    """What a sequence may decode until it has so many tokens."""
    sampling = request.sampling
    ends = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else spec.eos_token_ids))
    return Credit(until, ends, sampling.min_tokens)


def following(row: QueuedRow, step: int, now: int) -> QueuedRow:
    """The next row of a credit; `step` samples its token."""
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
    """The first `count` tokens of a divisible row, as a row that runs now; the row itself is what is left, and waits
    anew.
    """
    ids = row.ids or ()
    part = replace(row, tokens=count, ids=ids[:count], sample=False, part=True)
    row.start += count
    row.tokens -= count
    row.before += count
    row.ids, row.holds, row.since = ids[count:], True, now
    return part


def joined(part: QueuedRow, rest: QueuedRow) -> QueuedRow:
    """`first_part` undone: the row that waits, with a part before it that did not run."""
    rest.start, rest.tokens, rest.before = part.start, part.tokens + rest.tokens, part.before
    rest.ids, rest.holds = (*(part.ids or ()), *(rest.ids or ())), part.holds
    return rest
