"""Compare two models' predictions from their last hidden states: the score of BL-05 and further metrics.

Distributions are compared by `surgery.scoring.lens`, in bounded memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.scoring.lens import Alike, Lens, alike

_NO_TARGET = -100


@dataclass(frozen=True, slots=True)
class DeltaScore:
    """Means over tokens.

    Fields:
        similarity: Cosine of the vocabulary distributions.
        kl: Divergence from the first's distribution to the second's, in nats.
        top1: Share of tokens with the same likeliest prediction.
        accuracy: The second model's own, on the next tokens of the text.
        perplexity: The second model's own, on the next tokens of the text.
    """

    similarity: float
    kl: float
    top1: float
    accuracy: float
    perplexity: float


class DeltaScores:
    """Accumulates sums over rows."""

    def __init__(self) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64)
        self._rows = 0
        self._targets = 0

    def add_pair(self, found: Alike, targets: Tensor) -> None:
        """Add one pair's comparison, with targets [rows], negative where there is no next token."""
        known = (targets >= 0).to(found.cosine.device)
        zero = torch.zeros((), device=found.cosine.device)
        right, told = (zero if each is None else each[0, known].double().sum() for each in (found.right, found.told))
        sums = (found.cosine.double().sum(), found.kl_ab.double().sum(), found.agreement.sum(), right, -told)
        self._sums += torch.stack([each.double().cpu() for each in sums])
        self._rows += len(targets)
        self._targets += int(known.sum())

    @property
    def score(self) -> DeltaScore:
        """The means. Raises ZeroDivisionError if nothing was added."""
        cosine, kl, same, right, loss = (float(each) for each in self._sums)
        targets = max(1, self._targets)
        return DeltaScore(
            cosine / self._rows,
            kl / self._rows,
            same / self._rows,
            right / targets,
            math.exp(min(loss / targets, 700.0)),
        )


def compare_heads(a: Tensor, lens_a: Lens, b: Tensor, lens_b: Lens, ids: Tensor, scores: DeltaScores) -> None:
    """Score two models' last hidden states [rows, tokens, width] of the same windows of ids [rows, tokens]."""
    targets = F.pad(ids[:, 1:], (0, 1), value=_NO_TARGET).flatten()
    hidden = a.flatten(0, 1)[None], b.flatten(0, 1)[None]
    scores.add_pair(alike(lens_a, lens_b, *hidden, [(0, 0)], lens_a.vocabulary(a), targets=targets), targets)
