"""From a step's logits to its tokens: which rows want any, and what is sampled of them. Knows nothing of how the logits came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from runtime.engine.answer import PromptPart, asks_prompt, draw_of, prompt_part
from runtime.engine.rows import Rows
from runtime.engine.sampling import Draw, Largest, sample, stock_largest
from runtime.types import PromptLogprobs, Row, Sampled


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """A row's claim on logits of its model's tokens [lo, hi): the last one to sample, or all of a chunk for prompt log-probabilities."""

    row: Row
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gives: tokens in the plan's order by model, and prompt log-probabilities."""

    sampled: tuple[Sampled, ...]
    prompts: tuple[PromptLogprobs, ...]


def wanted_of(batch: Rows) -> tuple[Wanted, ...]:
    """Which of a model's tokens go through the head; none where there is no head."""
    wanted: list[Wanted] = []
    if not batch.model.has_head:
        return ()
    for row, span in zip(batch.rows, batch.spans, strict=True):
        if asks_prompt(batch.model, row):
            wanted.append(Wanted(row, span.lo, span.hi))
        elif row.sample:
            wanted.append(Wanted(row, span.hi - 1, span.hi))
    return tuple(wanted)


def picks_of(batch: Rows, wanted: Sequence[Wanted]) -> Sequence[int]:
    """The tokens of a model that somebody reads in the end: those whose logits are wanted, or all where there is no head."""
    if not batch.model.has_head:
        return range(batch.tokens)
    return [index for want in wanted for index in range(want.lo, want.hi)]


def outcome_of(
    batches: Mapping[str, Rows], wanted: Mapping[str, Sequence[Wanted]], logits: Mapping[str, Tensor], largest: Largest = stock_largest
) -> Outcome:
    """Sample every model's rows. `logits`: [wanted rows, vocabulary] by model."""
    sampled: list[Sampled] = []
    prompts: list[PromptLogprobs] = []
    for name, batch in batches.items():
        if wanted[name]:
            _finish(batch, wanted[name], logits[name], largest, sampled, prompts)
    return Outcome(tuple(sampled), tuple(prompts))


def _finish(
    batch: Rows, wanted: Sequence[Wanted], logits: Tensor, largest: Largest, sampled: list[Sampled], prompts: list[PromptLogprobs]
) -> None:
    """Sample a model's rows; prompt log-probabilities come from the same logits."""
    chosen: list[int] = []
    draws: list[Draw] = []
    at = 0
    for want in wanted:
        count = want.hi - want.lo
        if asks_prompt(batch.model, want.row):
            prompts.extend(prompt_part(PromptPart(batch.model, want.row, logits[at : at + count])))
        at += count
        if want.row.sample:
            chosen.append(at - 1)
            draws.append(draw_of(batch.model, want.row))
    if not draws:
        return
    rows = logits if len(chosen) == logits.shape[0] else logits[torch.tensor(chosen, device=logits.device)]
    results = sample(rows, draws, largest)
    for draw, result in zip(draws, results, strict=True):
        output = batch.model.sequences[result.seq].output
        del output[draw.generated :]
        output.append(result.token)
    sampled.extend(results)
