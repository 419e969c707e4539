"""From hidden states to what is counted, and from counts to accuracy with its error.

A *tally* is what one mixture scored on one batch. Errors are standard errors over batches; of a difference between two
mixtures they are those of the batch-by-batch difference, since both were asked the same. Knows nothing of where
mixtures come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.experiments.questions import QuestionBatch
from zoo.errors import InputError

#: Tokens whose logits are held at once: vocabularies are large.
_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ScoreTally:
    """Of text: `loss`, the sum over tokens in nats, `hits`, tokens that were the likeliest, `count` tokens. Of lines:
    hits of questions.
    """

    loss: float
    hits: int
    count: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over all tokens or questions, and its standard error (None with fewer than two batches)."""

    value: float
    error: float | None


@torch.inference_mode()
def tally(batch: QuestionBatch, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> ScoreTally:
    """Score one batch. `hidden` [B, T, width]; `head` gives logits [.., vocabulary]. Raises InputError for logits that
    are no numbers.
    """
    scores, hits = _scores(batch, hidden, head)
    if not bool(scores.isfinite().all()):
        raise InputError(f"a mixture of the models gives logits that are no numbers on batch {batch.key}")
    if batch.answers is None:
        return ScoreTally(-float(scores.sum()), int(hits), int(batch.scored.sum()))
    chosen = scores.view(len(batch.answers), -1).argmax(dim=1)
    return ScoreTally(0.0, int((chosen.cpu() == batch.answers).sum()), len(batch.answers))


def _scores(batch: QuestionBatch, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    """Per row the log-probability of its scored tokens, float64 [B]; and over all rows how many of them were the
    likeliest.
    """
    sums = torch.zeros(len(batch.ids), dtype=torch.float64)
    hits = 0
    for row, (ids, scored) in enumerate(zip(batch.ids, batch.scored, strict=True)):
        places = scored.nonzero().squeeze(1)
        for part in places.split(_TOKENS):
            logits = head(hidden[row, part.to(hidden.device) - 1]).float()
            wanted = ids[part].to(hidden.device)
            found = logits.log_softmax(-1).gather(1, wanted[:, None])
            sums[row] += float(found.double().sum())
            hits += int((logits.argmax(-1) == wanted).sum())
    return sums, hits


def mean(tallies: Sequence[ScoreTally], what: str) -> Estimate:
    """`what`: loss or hits, per token or question."""
    total = sum(each.count for each in tallies)
    value = sum(float(getattr(each, what)) for each in tallies) / total
    return Estimate(value, _error([float(getattr(each, what)) - value * each.count for each in tallies], total))


def difference(tallies: Sequence[ScoreTally], baseline: Sequence[ScoreTally], what: str) -> Estimate:
    """`what` of the first less that of the baseline, on the same batches."""
    total = sum(each.count for each in tallies)
    apart = [float(getattr(one, what)) - float(getattr(two, what)) for one, two in zip(tallies, baseline, strict=True)]
    value = sum(apart) / total
    return Estimate(value, _error([gap - value * each.count for gap, each in zip(apart, tallies, strict=True)], total))


def _error(residues: Sequence[float], total: int) -> float | None:
    """Standard error of a ratio of sums over batches: residues are each batch's sum less its share of the whole."""
    n = len(residues)
    if n < 2:
        return None
    return math.sqrt(n / (n - 1) * math.fsum(residue * residue for residue in residues)) / total
