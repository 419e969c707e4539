"""The loss of a stitched chain: the distance of its next-token distributions to B's own, and its gradient.

Logits exist for a few tokens at a time, forward and backward, so memory does not grow with the vocabulary or the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Head = Callable[[Tensor], Tensor]

#: Bytes of logits and temporaries at a time.
_BUDGET = 128 << 20
#: Tensors of the logits' size that exist at once, gradients included.
_COPIES = 10


@dataclass(frozen=True, slots=True)
class HeadLikeness:
    """Per token [n]: cosine of the two distributions (BL-05), and the divergence KL(wanted, given) in nats."""

    cosine: Tensor
    kl: Tensor


def likeness(given: Tensor, wanted: Tensor) -> HeadLikeness:
    """Compare logits [n, vocabulary]; if heads are padded to different sizes, over their common part."""
    count = min(given.shape[-1], wanted.shape[-1])
    log_given = given[..., :count].float().log_softmax(-1)
    log_wanted = wanted[..., :count].float().log_softmax(-1)
    share = log_wanted.exp()
    return HeadLikeness(F.cosine_similarity(log_given.exp(), share, dim=-1), (share * (log_wanted - log_given)).sum(-1))


def chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Yield the slices of tokens to compute at once."""
    step = max(1, _BUDGET // (_COPIES * 4 * vocabulary))
    return (slice(lo, min(lo + step, tokens)) for lo in range(0, tokens, step))


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss, as means over tokens.

    Fields:
        kl: Weight of the divergence.
        cosine: Weight of one minus the cosine.
        labels: Weight of the negative log-likelihood of the text's own next tokens.
    """

    kl: float
    cosine: float
    labels: float = 0.0

    def value(self, kl: float, cosine: float, nll: float) -> float:
        """Return the loss from these means."""
        return self.kl * kl + self.cosine * (1.0 - cosine) + self.labels * nll

    def gradient(
        self, head: Head, vocabulary: int, hidden: Tensor, wanted: Tensor, following: Tensor
    ) -> tuple[float, Tensor]:
        """Return the loss of hidden states before the head against B's own, and its gradient with respect to them.

        Args:
            hidden, wanted: [n, d_b]; no gradient goes into either.
            following: [n], the text's next tokens; -1 where unknown.
        """
        known = max(1, int((following >= 0).sum()))
        grown = torch.zeros_like(hidden, dtype=torch.float32)
        total = 0.0
        for part in chunks(len(hidden), vocabulary):
            leaf = hidden[part].detach().requires_grad_(True)
            with torch.no_grad():
                target = head(wanted[part])
            with torch.enable_grad():
                logits = head(leaf)
                alike = likeness(logits, target)
                loss = (self.kl * alike.kl.sum() + self.cosine * (1.0 - alike.cosine).sum()) / len(hidden)
                if self.labels:
                    missed = F.cross_entropy(logits.float(), following[part], ignore_index=-1, reduction="sum")
                    loss = loss + self.labels * missed / known
            (grown[part],) = torch.autograd.grad(loss, leaf)
            total += float(loss.detach())
        return total, grown
