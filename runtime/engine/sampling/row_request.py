"""What a row needs of its last tokens: a sampled token, log-probabilities of its prompt's tokens, hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from runtime.engine.models.loaded import LoadedModel
from runtime.engine.sampling.choice import TokenChoice
from runtime.engine.sampling.sampler import Draw
from runtime.engine.sampling.scores import LogitScores, prompt_scores
from runtime.types import Logprob, PromptLogprobs, Row


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A chunk of a prompt with the logits [tokens of the row, vocabulary] of its positions."""

    model: LoadedModel
    row: Row
    logits: Tensor


def asks_prompt(model: LoadedModel, row: Row) -> bool:
    """Return whether a row's sequence requests prompt log-probabilities and the row still runs prompt tokens."""
    request = model.sequences[row.seq].request
    return request.sampling.prompt_logprobs is not None and row.start < model.spec.virtual_tokens + len(request.prompt)


def pooled_tokens(model: LoadedModel, row: Row) -> range:
    """Return which of a row's tokens are pooled, by their numbers in the row."""
    request, begin = model.sequences[row.seq].request, row.start - model.spec.virtual_tokens
    if request.sampling.pooling is None:
        return range(0)
    first = 0 if request.sampling.pooling == "mean" else len(request.prompt) - 1
    return range(max(0, first - begin), min(len(row.tokens), len(request.prompt) - begin))


@dataclass(frozen=True, slots=True)
class PooledStates:
    """Sum of the final hidden states of a prompt's tokens from number `start` on, not copied to the host yet."""

    seq: str
    start: int
    positions: int
    total: Tensor

    def read(self) -> PromptLogprobs:
        """Wait for them and return them."""
        states = self.total.cpu().numpy().astype("<f4").tobytes()
        return PromptLogprobs(self.seq, self.start, (), (), self.positions, states)


@dataclass(frozen=True, slots=True)
class PartScores:
    """Log-probabilities of a sequence's prompt tokens from number `start` on, not copied to the host yet."""

    seq: str
    start: int
    targets: tuple[int, ...]
    scores: LogitScores

    def read(self) -> PromptLogprobs:
        """Wait for them and return them."""
        rows = self.scores.rows
        chosen = tuple(Logprob(token, row.chosen) for token, row in zip(self.targets, rows, strict=True))
        return PromptLogprobs(self.seq, self.start, chosen, tuple(row.top for row in rows))


def prompt_part(part: PromptPart, choice: TokenChoice) -> list[PartScores]:
    """Return the log-probabilities of the prompt tokens that a chunk's positions predict; none after the prompt."""
    request = part.model.sequences[part.row.seq].request
    begin = part.row.start - part.model.spec.virtual_tokens
    first = max(begin, 0) + 1
    skipped = first - begin - 1  # positions that predict virtual tokens, or the prompt's first
    targets = request.prompt[first : max(first, begin + 1 + part.logits.shape[0])]
    if not targets:
        return []
    scores = prompt_scores(
        part.logits[skipped : skipped + len(targets)], targets, request.sampling.prompt_logprobs or 0, choice
    )
    return [PartScores(part.row.seq, first, targets, scores)]


def draw_of(model: LoadedModel, row: Row) -> Draw:
    """Return how a row's next token is to be sampled."""
    held = model.sequences[row.seq]
    params = held.request.sampling
    # A row may start again before tokens that a speculated row has sampled (BL-25).
    produced = held.output if len(held.output) <= row.generated else held.output[: row.generated]
    stops = tuple(dict.fromkeys((*model.spec.eos_token_ids, *params.stop_token_ids)))
    return Draw(row.seq, params, row.generated, held.request.prompt, produced, stops, held.constraint, held.seen)
