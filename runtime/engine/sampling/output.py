"""From a step's logits to its tokens: which rows need logits, and the sampling of their tokens.

Used by `StepRun` and by replayed recordings; it does not depend on how the logits were computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from runtime.engine.models.loaded import Held, LoadedModel
from runtime.engine.sampling.choice import TokenChoice
from runtime.engine.sampling.constraints import Constraint, prepare_masks, ready_within
from runtime.engine.sampling.row_request import (
    PartScores,
    PooledStates,
    PromptPart,
    asks_prompt,
    draw_of,
    pooled_tokens,
    prompt_part,
)
from runtime.engine.sampling.sampler import STOCK, Drawn, draw, reads_output
from runtime.engine.step.batch import ModelBatch
from runtime.kv.transfers import put
from runtime.types import PromptLogprobs, Row, Sampled

#: Seconds for which a step waits for grammars at most, where it may go on without their rows.
PATIENCE = 0.005


class WantedLogits(msgspec.Struct, frozen=True, gc=False):
    """A row that needs logits of its model's tokens [lo, hi).

    These are the last token, to sample, or all tokens of a chunk, for prompt log-probabilities.

    Fields:
        pooled: Number in the prompt of the first of them, where not their logits are needed but their hidden states.
    """

    row: Row
    lo: int
    hi: int
    pooled: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's sampled tokens, in the plan's order by model, and its prompt log-probabilities."""

    sampled: tuple[Sampled, ...]
    prompts: tuple[PromptLogprobs, ...]


def wanted_of(batch: ModelBatch) -> tuple[WantedLogits, ...]:
    """Return which of a model's tokens go through the head; none for a stage without a head."""
    wanted: list[WantedLogits] = []
    if not batch.model.has_head:
        return ()
    for row, span in zip(batch.rows, batch.spans, strict=True):
        if asks_prompt(batch.model, row):
            wanted.append(WantedLogits(row, span.lo, span.hi))
        elif row.sample:
            wanted.append(WantedLogits(row, span.hi - 1, span.hi))
        elif pooled := pooled_tokens(batch.model, row):
            first = row.start - batch.model.spec.virtual_tokens + pooled.start
            wanted.append(WantedLogits(row, span.lo + pooled.start, span.lo + pooled.stop, first))
    return tuple(wanted)


def picks_of(batch: ModelBatch, wanted: Sequence[WantedLogits]) -> Sequence[int]:
    """Return the model's tokens needed after the last attention layer.

    These are the tokens with wanted logits, or all tokens for a stage without a head.
    """
    if not batch.model.has_head:
        return range(batch.tokens)
    return [index for want in wanted for index in range(want.lo, want.hi)]


class Sampling:
    """The tokens that a step has sampled, on the device until they are read."""

    def __init__(self) -> None:
        self._drawn: dict[str, Drawn] = {}
        self._held: dict[str, list[Held]] = {}
        self._prompts: list[PartScores | PooledStates] = []
        self._outcome: Outcome | None = None
        #: Rows that got no token, since their grammars are not ready.
        self.deferred: list[str] = []

    def add(self, name: str, drawn: Drawn, held: list[Held]) -> None:
        """Add a model's tokens and the sequences that get them."""
        self._drawn[name], self._held[name] = drawn, held

    def add_prompt(self, scores: Sequence[PartScores] | Sequence[PooledStates]) -> None:
        self._prompts.extend(scores)

    def tokens_of(self, name: str, seqs: Sequence[str]) -> Tensor:
        """Return the tokens of these sequences of a model, [len(seqs)], on the device.

        Raises KeyError for a sequence without a token.
        """
        drawn = self._drawn[name]
        if len(seqs) == len(drawn.draws) and all(draw.seq == seq for draw, seq in zip(drawn.draws, seqs, strict=True)):
            return drawn.tokens
        rows = {draw.seq: row for row, draw in enumerate(drawn.draws)}
        return drawn.tokens[put([rows[seq] for seq in seqs], drawn.tokens.device)]

    def read(self) -> Outcome:
        """Wait for the tokens, append them to their sequences' outputs, and return them.

        Tokens of an output from the draw's index on are replaced. Further calls return the same result.
        """
        if self._outcome is None:
            sampled: list[Sampled] = []
            bound: list[tuple[Constraint, int, Sequence[int]]] = []
            for name, drawn in self._drawn.items():
                told = drawn.read()
                for held, draw, one in zip(self._held[name], drawn.draws, told, strict=True):
                    del held.output[draw.generated :]
                    held.output.append(one.token)
                    if held.constraint is not None:
                        bound.append((held.constraint, len(held.output) - 1, (one.token,)))
                sampled.extend(told)
            prepare_masks(bound)
            self._outcome = Outcome(tuple(sampled), tuple(part.read() for part in self._prompts))
        return self._outcome


def sampling_of(
    batches: Mapping[str, ModelBatch],
    wanted: Mapping[str, Sequence[WantedLogits]],
    logits: Mapping[str, Tensor],
    choice: TokenChoice = STOCK,
    before: Sampling | None = None,
    defers: bool = False,
) -> Sampling:
    """Sample every model's rows.

    Args:
        wanted: the rows with wanted logits, by model.
        logits: [wanted rows, vocabulary] by model.
        before: the sampling of the preceding step if it may not have been read yet. It is read first if an awaiting row
            has penalties or a grammar, which depend on the tokens produced so far.
        defers: rows with grammars that are not ready may be left out; some rows remain.
    """
    made = Sampling()
    if defers:
        made.deferred = _late_rows(batches, wanted)
    for name, batch in batches.items():
        scored = [want for want in wanted[name] if want.pooled is None]
        if scored:
            _finish(name, batch, scored, logits[name], choice, before, made)
    return made


def _late_rows(batches: Mapping[str, ModelBatch], wanted: Mapping[str, Sequence[WantedLogits]]) -> list[str]:
    """Return the rows with grammars that are not ready, after some patience."""
    rows = [(batches[name].model, want.row) for name, some in wanted.items() for want in some if want.row.sample]
    closed = {row.seq: one for model, row in rows if (one := late_constraint(model, row)) is not None}
    if closed:
        ready_within([*closed.values()], PATIENCE)
    return [seq for seq, one in closed.items() if one.late]


def late_constraint(model: LoadedModel, row: Row) -> Constraint | None:
    """Return the constraint of a row if it is not ready; else, and without a grammar, None."""
    found = model.sequences[row.seq].constraint if row.sample else None
    return None if found is None or found.is_ready else found


def _finish(
    name: str,
    batch: ModelBatch,
    wanted: Sequence[WantedLogits],
    logits: Tensor,
    choice: TokenChoice,
    before: Sampling | None,
    made: Sampling,
) -> None:
    """Sample a model's rows and compute prompt log-probabilities from the same logits."""
    chosen: list[int] = []
    rows: list[Row] = []
    at = 0
    for want in wanted:
        count = want.hi - want.lo
        if want.row.seq in made.deferred:
            at += count
            continue
        if asks_prompt(batch.model, want.row):
            made.add_prompt(prompt_part(PromptPart(batch.model, want.row, logits[at : at + count]), choice))
        at += count
        if want.row.sample:
            chosen.append(at - 1)
            rows.append(want.row)
    if not rows:
        return
    held = [batch.model.sequences[row.seq] for row in rows]
    if before is not None and any(
        row.awaits and reads_output(one.request.sampling) for row, one in zip(rows, held, strict=True)
    ):
        before.read()
    picked = logits if len(chosen) == logits.shape[0] else logits[put(chosen, logits.device)]
    made.add(name, draw(picked, [draw_of(batch.model, row) for row in rows], choice), held)
