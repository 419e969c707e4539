"""How near two models' predictions are, from their last hidden states: the score of BL-05 and what is read beside it.

Distributions are made a few rows at a time, so that a large vocabulary never stands in memory for all tokens. Knows tensors and heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

#: Elements of logits that are held at once, per model.
_AT_ONCE = 1 << 23

#: Hidden states [rows, width] to logits [rows, vocabulary].
Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Score:
    """Means over tokens. `similarity`: cosine of the vocabulary distributions; `kl`: from the first's to the second's, in nats.

    `top1`: share of tokens where both would say the same; `accuracy`, `perplexity`: the second's own, on the next tokens of the text.
    """

    similarity: float
    kl: float
    top1: float
    accuracy: float
    perplexity: float


class Scores:
    """Sums while rows come in."""

    def __init__(self) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64)
        self._rows = 0
        self._targets = 0

    def see(self, a: Tensor, b: Tensor, targets: Tensor) -> None:
        """Logits [rows, vocabulary] of both; targets [rows], -100 where there is no next token."""
        log_p, log_q = a.float().log_softmax(-1), b.float().log_softmax(-1)
        p, q = log_p.exp(), log_q.exp()
        known = targets != -100
        best = log_q.argmax(-1)
        sums = (
            F.cosine_similarity(p, q, dim=-1).sum(),
            (p * (log_p - log_q).clamp(-1e4, 1e4)).sum(),
            (log_p.argmax(-1) == best).sum(),
            (best[known] == targets[known]).sum(),
            F.nll_loss(log_q[known], targets[known], reduction="sum") if bool(known.any()) else torch.zeros(()),
        )
        self._sums += torch.stack([each.double().cpu() for each in sums])
        self._rows += len(a)
        self._targets += int(known.sum())

    @property
    def score(self) -> Score:
        """Raises ZeroDivisionError when nothing was seen."""
        cosine, kl, same, right, loss = (float(each) for each in self._sums)
        targets = max(1, self._targets)
        return Score(cosine / self._rows, kl / self._rows, same / self._rows, right / targets, math.exp(min(loss / targets, 700.0)))


def compare_heads(a: Tensor, head_a: Head, b: Tensor, head_b: Head, ids: Tensor, scores: Scores) -> None:
    """Score two models' last hidden states [rows, tokens, width] of the same windows of ids [rows, tokens]."""
    targets = F.pad(ids[:, 1:], (0, 1), value=-100).flatten()
    flat_a, flat_b = a.flatten(0, 1), b.flatten(0, 1)
    width = head_a(flat_a[:1]).shape[-1]
    step = max(1, _AT_ONCE // width)
    for lo in range(0, len(flat_a), step):
        rows = slice(lo, lo + step)
        scores.see(head_a(flat_a[rows]), head_b(flat_b[rows]), targets[rows])
