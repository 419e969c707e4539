"""What a row asks of its logits: a draw, and the log-probabilities of its prompt's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from runtime.engine.models.loaded import LoadedModel
from runtime.engine.sampling.sampler import Draw, LogitScores, prompt_scores
from runtime.types import Logprob, PromptLogprobs, Row


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A chunk of a prompt with the logits [tokens of the row, vocabulary] of each of its positions."""

    model: LoadedModel
    row: Row
    logits: Tensor


def asks_prompt(model: LoadedModel, row: Row) -> bool:
    """Whether a row's sequence wants log-probabilities of prompt tokens, and the row still runs prompt."""
    request = model.sequences[row.seq].request
    return request.sampling.prompt_logprobs is not None and row.start < model.spec.virtual_tokens + len(request.prompt)


@dataclass(frozen=True, slots=True)
class PartScores:
    """Log-probabilities of prompt tokens number `start`, … of a sequence, which the host has not seen yet."""

    seq: str
    start: int
    targets: tuple[int, ...]
    scores: LogitScores

    def read(self) -> PromptLogprobs:
        rows = self.scores.rows
        chosen = tuple(Logprob(token, row.chosen) for token, row in zip(self.targets, rows, strict=True))
        return PromptLogprobs(self.seq, self.start, chosen, tuple(row.top for row in rows))


def prompt_part(part: PromptPart) -> list[PartScores]:
    """Log-probabilities of the prompt tokens that a chunk's positions predict; none for what comes after the prompt."""
    request = part.model.sequences[part.row.seq].request
    begin = part.row.start - part.model.spec.virtual_tokens
    first = max(begin, 0) + 1
    skipped = first - begin - 1  # positions that predict virtual tokens, or the prompt's first
    targets = request.prompt[first : max(first, begin + 1 + part.logits.shape[0])]
    if not targets:
        return []
    scores = prompt_scores(
        part.logits[skipped : skipped + len(targets)], targets, request.sampling.prompt_logprobs or 0
    )
    return [PartScores(part.row.seq, first, targets, scores)]


def draw_of(model: LoadedModel, row: Row) -> Draw:
    """How a row's next token is to be chosen."""
    held = model.sequences[row.seq]
    params = held.request.sampling
    # A row may go back behind what a tentative one has chosen (BL-25).
    produced = held.output if len(held.output) <= row.generated else held.output[: row.generated]
    stops = tuple(dict.fromkeys((*model.spec.eos_token_ids, *params.stop_token_ids)))
    return Draw(row.seq, params, row.generated, held.request.prompt, produced, stops)
