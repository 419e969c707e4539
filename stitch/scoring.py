"""Score stitched chains on held-out text: similarity to B's next-token distributions, and prediction of the text.

All variants of a stitch (trained, its start, its control, none) are measured in one pass over both models, batch by
batch, together with the two models themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stitch.objective import chunks, likeness
from stitch.pair import ModelPair
from stitch.points import StitchPoint

#: `stitch(hidden, position)`: A's states [B, T, d_a] -> B's [B, T, d_b].
Variant = Callable[[Tensor, float], Tensor]
_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of the text's next tokens.

    Fields:
        accuracy: Share of tokens that were the likeliest.
        nll: Mean negative log-likelihood in nats.
    """

    accuracy: float
    nll: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll, 700.0))


@dataclass(frozen=True, slots=True)
class PointScore:
    """Scores at one place, means over tokens.

    Fields:
        similarity: Cosine at the head against B (BL-05).
        kl: KL(B, chain).
        prediction: The chain's own predictions.
    """

    similarity: float
    kl: float
    prediction: Prediction


@dataclass(frozen=True)
class StitchScores:
    """Scores of a stitch and its models.

    Fields:
        variants: By variant, then by place.
        a: Model A by itself, compared with B as the chains are.
        b: Model B by itself.
    """

    variants: Mapping[str, Mapping[StitchPoint, PointScore]]
    a: PointScore
    b: Prediction


@torch.no_grad()
def score(
    pair: ModelPair,
    windows: Tensor,
    points: Sequence[StitchPoint],
    variants: Mapping[str, Variant],
    advance: Callable[[int], None] | None = None,
) -> StitchScores:
    """Measure variants at places over windows [n, length] of token ids. `advance` is called with the windows done."""
    sums = {(name, point): _Sums() for name in variants for point in points}
    of_a, of_b = _Sums(), _Sums()
    rows = max(1, _TOKENS // windows.shape[1])
    last = pair.layers[0] - 1
    for lo in range(0, len(windows), rows):
        ids = windows[lo : lo + rows].to(pair.b.device)
        _, final = pair.passes(ids)
        of_b.add_(pair.b.head, final, final, pair.b.head, ids)
        for layer, hidden in pair.heads(ids, {last, *(point.a_layer for point in points)}):
            if layer == last:
                of_a.add_(pair.a.head, hidden, final, pair.b.head, ids)
            for point in (point for point in points if point.a_layer == layer):
                for name, variant in variants.items():
                    ended = pair.tail(variant(hidden, point.position), ids, point.b_layer)
                    sums[name, point].add_(pair.b.head, ended, final, pair.b.head, ids)
        if advance is not None:
            advance(min(lo + rows, len(windows)))
    by_variant = {name: {point: sums[name, point].score() for point in points} for name in variants}
    return StitchScores(by_variant, of_a.score(), of_b.score().prediction)


class _Sums:
    """Sums of one chain's scores over tokens."""

    def __init__(self) -> None:
        self._tokens = self._next = 0
        self._cosine = self._kl = self._right = self._nll = 0.0

    def add_(
        self,
        head: Callable[[Tensor], Tensor],
        given: Tensor,
        wanted: Tensor,
        wanted_head: Callable[[Tensor], Tensor],
        ids: Tensor,
    ) -> None:
        """Add states before the heads [B, T, width], the chain's and B's, over the tokens `ids` [B, T]."""
        # The token after the last of a window is unknown, so it counts for the similarity only.
        following = F.pad(ids[:, 1:], (0, 1), value=-1).flatten()
        given, wanted = given.flatten(0, 1), wanted.flatten(0, 1)
        for part in chunks(len(given), head(given[:1]).shape[-1]):
            logits = head(given[part]).float()
            alike = likeness(logits, wanted_head(wanted[part]))
            known, tokens = following[part] >= 0, following[part].clamp_min(0)
            picked = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            self._cosine += float(alike.cosine.double().sum())
            self._kl += float(alike.kl.double().sum())
            self._nll -= float(picked[known].double().sum())
            self._right += float((logits.argmax(-1) == tokens)[known].sum())
            self._next += int(known.sum())
        self._tokens += len(given)

    def score(self) -> PointScore:
        prediction = Prediction(self._right / max(1, self._next), self._nll / max(1, self._next))
        return PointScore(min(1.0, self._cosine / self._tokens), self._kl / self._tokens, prediction)
