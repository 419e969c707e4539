"""From logits to tokens, for all rows of a step at once.

Order of operations, as vLLM's users expect it: logit bias, minimum-length masking, repetition, frequency and presence penalties,
temperature, then top-k, top-p and min-p on the scaled distribution, then one draw. Log-probabilities are of the raw logits.

A draw is the inverse of the cumulated distribution at a number that depends only on (seed, index of the token): a sequence samples the
same tokens whatever else is in the batch, and after a preemption it goes on as it would have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from runtime.types import Logprob, Sampled, SamplingParams

#: Logits [rows, vocabulary] in float32 -> [rows], the first of each row's largest; of a row that holds NaN, the first of those.
Largest = Callable[[Tensor], Tensor]


def stock_largest(logits: Tensor) -> Tensor:
    """`Largest`, as torch has it."""
    return torch.argmax(logits, dim=-1)


class Draw(msgspec.Struct, frozen=True, gc=False):
    """One row to sample: whose it is, how, and the tokens it has seen. `stops`: ids masked until `min_tokens` are out."""

    seq: str
    params: SamplingParams
    generated: int
    prompt: Sequence[int]
    output: Sequence[int]
    stops: tuple[int, ...]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from 53 bits of BLAKE3(seed, index)."""
    digest = blake3(f"{seed}:{index}".encode()).digest(8)
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def sample(logits: Tensor, draws: Sequence[Draw], largest: Largest = stock_largest) -> list[Sampled]:
    """One token per row.

    Args:
        logits: [rows, vocabulary] in any float dtype; not modified.
        draws: one per row.
        largest: how greedy rows' tokens are found.
    """
    raw = logits.float()
    shaped = _shape(raw, draws)
    tokens = largest(shaped)
    picked = [row for row, draw in enumerate(draws) if not draw.params.greedy]
    if picked:
        index = torch.tensor(picked, device=logits.device)
        tokens[index] = _pick(shaped[index], [draws[row] for row in picked])
    return _report(raw, tokens, draws)


def _shape(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Biases, masks and penalties on the rows that ask for them; the input itself when none does."""
    out = logits
    for row, draw in enumerate(draws):
        if not _reshapes(draw):
            continue
        if out is logits:
            out = logits.clone()
        _bias_(out[row], draw)
        _penalise_(out[row], draw)
    return out


def _reshapes(draw: Draw) -> bool:
    p = draw.params
    penalties = p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0
    return bool(p.logit_bias) or draw.generated < p.min_tokens or penalties


def _bias_(row: Tensor, draw: Draw) -> None:
    if draw.params.logit_bias:
        ids, values = zip(*draw.params.logit_bias, strict=True)
        row[torch.tensor(ids, device=row.device)] += torch.tensor(values, device=row.device)
    if draw.generated < draw.params.min_tokens and draw.stops:
        row[torch.tensor(draw.stops, device=row.device)] = -math.inf


def _penalise_(row: Tensor, draw: Draw) -> None:
    """Repetition over prompt and output (as transformers and vLLM), frequency and presence over the output only (as OpenAI)."""
    p = draw.params
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*draw.prompt, *draw.output}), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if draw.output and (p.frequency_penalty != 0.0 or p.presence_penalty != 0.0):
        ids, counts = torch.unique(torch.tensor(list(draw.output), device=row.device), return_counts=True)
        row[ids] -= p.frequency_penalty * counts + p.presence_penalty


def _pick(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw from the truncated distributions. logits [rows, vocabulary] -> token ids [rows]."""
    device = logits.device
    temperature = torch.tensor([draw.params.temperature for draw in draws], device=device)[:, None]
    order = torch.sort(logits / temperature, dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(order.values, dim=-1)
    kept = torch.where(_cut(probabilities, draws), torch.zeros_like(probabilities), probabilities)
    cumulated = kept.double().cumsum(-1)
    u = torch.tensor([uniform(draw.params.seed, draw.generated) for draw in draws], dtype=torch.float64, device=device)[:, None]
    place = torch.searchsorted(cumulated, u * cumulated[:, -1:], right=True)
    last = ((kept > 0).sum(-1, keepdim=True) - 1).clamp_(min=0)  # nothing is kept of a row that is not a number
    return order.indices.gather(1, torch.minimum(place, last))[:, 0]


def _cut(probabilities: Tensor, draws: Sequence[Draw]) -> Tensor:
    """True where top-k, top-p or min-p drop a token. `probabilities` are sorted from high to low; the first is always kept."""
    device, width = probabilities.device, probabilities.shape[1]
    rank = torch.arange(width, device=device)
    top_k = torch.tensor([draw.params.top_k or width for draw in draws], device=device)[:, None]
    top_p = torch.tensor([draw.params.top_p for draw in draws], device=device)[:, None]
    min_p = torch.tensor([draw.params.min_p for draw in draws], device=device)[:, None]
    drop = rank >= top_k
    left = torch.where(drop, torch.zeros_like(probabilities), probabilities)
    left = left / left.sum(-1, keepdim=True)
    before = left.cumsum(-1) - left
    drop = drop | ((before >= top_p) & (top_p < 1.0)) | (probabilities < min_p * probabilities[:, :1])
    drop[:, 0] = False
    return drop


def _report(raw: Tensor, tokens: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    chosen = tokens.tolist()
    asked = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
    if not asked:
        return [Sampled(draw.seq, token) for draw, token in zip(draws, chosen, strict=True)]
    details = dict(
        zip(asked, _logprobs(raw[asked], [chosen[row] for row in asked], [draws[row].params.logprobs for row in asked]), strict=True)
    )
    out = []
    for row, draw in enumerate(draws):
        detail = details.get(row)
        out.append(Sampled(draw.seq, chosen[row]) if detail is None else Sampled(draw.seq, chosen[row], detail.chosen, detail.top))
    return out


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """The chosen token's log-probability and the most likely alternatives, best first."""

    chosen: float
    top: tuple[Logprob, ...]


def _logprobs(raw: Tensor, chosen: Sequence[int], wanted: Sequence[int | None]) -> list[RowLogprobs]:
    logprobs = torch.log_softmax(raw, dim=-1)
    own = logprobs.gather(1, torch.tensor(list(chosen), device=raw.device)[:, None])[:, 0].tolist()
    most = min(max((count or 0) for count in wanted), raw.shape[1])
    if most == 0:
        return [RowLogprobs(value, ()) for value in own]
    top = torch.topk(logprobs, most, dim=-1)
    values, ids = top.values.tolist(), top.indices.tolist()
    rows = []
    for row, count in enumerate(wanted):
        pairs = zip(ids[row][: count or 0], values[row][: count or 0], strict=True)
        rows.append(RowLogprobs(own[row], tuple(Logprob(token, value) for token, value in pairs)))
    return rows


def prompt_logprobs(logits: Tensor, targets: Sequence[int], count: int) -> list[RowLogprobs]:
    """Log-probabilities of the tokens that followed each position. logits [positions, vocabulary]; targets: one id per position."""
    return _logprobs(logits.float(), targets, [count] * len(targets))
