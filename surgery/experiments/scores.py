"""Count scores from hidden states, and compute accuracy with its error from the counts.

A *tally* is the score of one mixture on one batch. Errors are standard errors over batches. For a difference between
two mixtures they are those of the batch-by-batch difference, since both have the same questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.experiments.questions import QuestionBatch
from zoo.errors import InputError

#: Tokens with logits in memory at once: vocabularies are large.
_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ScoreTally:
    """Score of one mixture on one batch.

    Fields:
        loss: For text, the sum over tokens in nats.
        hits: Tokens that were the likeliest, or line questions answered right.
        count: Tokens or questions.
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
    """Score one batch. Raises InputError for logits that are not finite.

    Args:
        hidden: [B, T, width].
        head: Gives logits [.., vocabulary].
    """
    scores, hits = _scores(batch, hidden, head)
    if not bool(scores.isfinite().all()):
        raise InputError(f"a mixture of the models gives logits that are no numbers on batch {batch.key}")
    if batch.answers is None:
        return ScoreTally(-float(scores.sum()), int(hits), int(batch.scored.sum()))
    chosen = scores.view(len(batch.answers), -1).argmax(dim=1)
    return ScoreTally(0.0, int((chosen.cpu() == batch.answers).sum()), len(batch.answers))


def _scores(batch: QuestionBatch, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    """Return each row's log-probability of its scored tokens, float64 [B], and the number of likeliest tokens."""
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
    """Return the mean of `what` (loss or hits) per token or question."""
    total = sum(each.count for each in tallies)
    value = sum(float(getattr(each, what)) for each in tallies) / total
    return Estimate(value, _error([float(getattr(each, what)) - value * each.count for each in tallies], total))


def difference(tallies: Sequence[ScoreTally], baseline: Sequence[ScoreTally], what: str) -> Estimate:
    """Return the mean of `what` minus that of the baseline, on the same batches."""
    total = sum(each.count for each in tallies)
    apart = [float(getattr(one, what)) - float(getattr(two, what)) for one, two in zip(tallies, baseline, strict=True)]
    value = sum(apart) / total
    return Estimate(value, _error([gap - value * each.count for gap, each in zip(apart, tallies, strict=True)], total))


def _error(residues: Sequence[float], total: int) -> float | None:
    """Return the standard error of a ratio of sums over batches.

    Args:
        residues: Each batch's sum minus its share of the whole.
    """
    n = len(residues)
    if n < 2:
        return None
    return math.sqrt(n / (n - 1) * math.fsum(residue * residue for residue in residues)) / total
