"""Sample tokens from logits, for all rows of a step at once.

Order of operations, as in vLLM: the grammar's mask, logit bias, minimum-length masking, repetition, frequency and
presence penalties, temperature, then top-k, top-p and min-p on the scaled distribution, then one draw.
Log-probabilities are of the raw logits; of a row with a grammar, of its masked ones, as in vLLM.

Sampled tokens stay on the device until they are read, so the next step can start from them before the host has seen
them. Only penalties read tokens on the host, and wait for them.

A draw's number depends only on (seed, index of the token). So a sequence samples the same tokens in any batch, and
continues identically after a preemption.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from runtime.engine.sampling.choice import NO_MASKS, SamplingColumns, StockChoice, TokenChoice
from runtime.engine.sampling.constraints import Constraint
from runtime.engine.sampling.penalties import RowPenalties, SeenTokens, penalises
from runtime.engine.sampling.scores import LogitScores, RowLogprobs
from runtime.grammars.state import TokenMask
from runtime.kv.transfers import Fetch, put
from runtime.types import Sampled, SamplingParams

#: How tokens are chosen without kernels.
STOCK = StockChoice()


class Draw(msgspec.Struct, frozen=True, gc=False):
    """One row to sample.

    Fields:
        seq: The sequence.
        params: How its tokens are sampled.
        generated: Tokens produced so far, the index of this one.
        prompt, output: Tokens that penalties count.
        stops: Ids that are masked until `min_tokens` are produced.
        constraint: The grammar that its tokens follow.
        seen: The tokens that its penalties count, kept from step to step; else counted anew.
    """

    seq: str
    params: SamplingParams
    generated: int
    prompt: Sequence[int]
    output: Sequence[int]
    stops: tuple[int, ...]
    constraint: Constraint | None = None
    seen: SeenTokens | None = None


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) from 53 bits of BLAKE3(seed, index)."""
    digest = blake3(f"{seed}:{index}".encode()).digest(8)
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each of `draws`: `tokens` [draws] on the logits' device."""

    draws: Sequence[Draw]
    tokens: Tensor
    _chosen: Fetch
    _scores: Mapping[int, Callable[[], RowLogprobs]]

    def read(self) -> list[Sampled]:
        """Wait for the tokens and return them in the order of the draws, with log-probabilities where requested."""
        out = []
        for row, (draw, token) in enumerate(zip(self.draws, self._chosen.values(), strict=True)):
            if row in self._scores:
                score = self._scores[row]()
                out.append(Sampled(draw.seq, token, score.chosen, score.top))
            else:
                out.append(Sampled(draw.seq, token))
        return out


def sample(logits: Tensor, draws: Sequence[Draw], choice: TokenChoice = STOCK) -> list[Sampled]:
    """Sample one token per row and read them at once. Arguments as `draw`."""
    return draw(logits, draws, choice).read()


def draw(logits: Tensor, draws: Sequence[Draw], choice: TokenChoice = STOCK) -> Drawn:
    """Sample one token per row.

    Args:
        logits: [rows, vocabulary] in any float dtype; float32 ones may be modified.
        draws: one per row.
        choice: how the device chooses tokens.
    """
    raw = logits.float()
    masks = _masks_of(draws)
    if masks and any(draw.params.logprobs is not None for draw in draws):
        choice.allow_(raw, masks)  # log-probabilities are of the masked logits
        masks = NO_MASKS
    sampled = [row for row, draw in enumerate(draws) if not draw.params.greedy]
    by = columns_of(sampled, [draws[row].params for row in sampled], [draws[row].generated for row in sampled])
    tokens = choice.chosen(_shape(raw, draws, choice), by, masks)
    return Drawn(draws, tokens, Fetch(tokens), _scores(raw, tokens, draws, choice))


def _masks_of(draws: Sequence[Draw]) -> Mapping[int, TokenMask]:
    """Return the tokens that the rows' grammars allow, by row."""
    return {
        row: draw.constraint.allowed(len(draw.output)) for row, draw in enumerate(draws) if draw.constraint is not None
    }


def _shape(logits: Tensor, draws: Sequence[Draw], choice: TokenChoice) -> Tensor:
    """Apply biases, minimum lengths and penalties to the rows that have any.

    In place, unless log-probabilities are computed from the logits afterwards.
    """
    shaped = [row for row, draw in enumerate(draws) if is_shaped(draw)]
    if not shaped:
        return logits
    if any(draw.params.logprobs is not None for draw in draws):
        logits = logits.clone()
    penalties: list[RowPenalties] = []
    for row in shaped:
        draw = draws[row]
        _bias_(logits[row], draw)
        if penalises(draw.params):
            seen = draw.seen or SeenTokens(draw.params, draw.prompt)
            penalties.append(seen.penalties(row, draw.output))
    if penalties:
        choice.penalise_(logits, penalties)
    return logits


def reads_output(params: SamplingParams) -> bool:
    """Return whether the choice of a sequence's next token reads the tokens it already has: penalties, a grammar."""
    return penalises(params) or bool(params.grammar)


def is_shaped(draw: Draw) -> bool:
    """Return whether a row's biases, minimum length or penalties change its logits."""
    params = draw.params
    return bool(params.logit_bias) or draw.generated < params.min_tokens or penalises(params)


def _bias_(row: Tensor, draw: Draw) -> None:
    if draw.params.logit_bias:
        ids, values = zip(*draw.params.logit_bias, strict=True)
        row[put(ids, row.device)] += put(values, row.device, torch.float32)
    if draw.generated < draw.params.min_tokens and draw.stops:
        row.index_fill_(0, put(draw.stops, row.device), -math.inf)


def columns_of(rows: Sequence[int], params: Sequence[SamplingParams], generated: Sequence[int]) -> SamplingColumns:
    """Return what rows are drawn by. `generated`: the index of each row's token."""
    return SamplingColumns(
        rows,
        [each.temperature for each in params],
        [each.top_k for each in params],
        [each.top_p for each in params],
        [each.min_p for each in params],
        [uniform(each.seed, index) for each, index in zip(params, generated, strict=True)],
    )


def _scores(
    raw: Tensor, tokens: Tensor, draws: Sequence[Draw], choice: TokenChoice
) -> Mapping[int, Callable[[], RowLogprobs]]:
    """Return functions that read the log-probabilities of a row, for the rows that request them."""
    wanted = {row: draw.params.logprobs for row, draw in enumerate(draws) if draw.params.logprobs is not None}
    if not wanted:
        return {}
    if len(wanted) < len(draws):
        index = put(list(wanted), raw.device)
        raw, tokens = raw[index], tokens[index]
    found = LogitScores(raw, tokens, list(wanted.values()), choice)
    return {row: functools.partial(found.row, at) for at, row in enumerate(wanted)}
