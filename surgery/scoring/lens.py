"""Compare vocabulary distributions of two models' hidden states without holding a whole distribution (BL-05).

A model's own final norm and head turn the hidden states after any of its components into logits; only slices of the
vocabulary are in memory at a time. Per token, sums are accumulated slice by slice, each relative to the largest logit
so far:

    m  = max l          Z = sum e^(l - m)         Q = sum e^(2 (l - m))         cosine = D / sqrt(Q_a Q_b)
    D  = sum e^(l_a - m_a + l_b - m_b)            KL(a, b) = sum e^(l_a - m_a) (l_a - l_b) / Z_a - m_a - ln Z_a + m_b +
                                                  ln Z_b

The normaliser of the cosine cancels. Memory is bounded by `BUDGET` for any vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.modules.components import LmHead
from surgery.tensors.half_products import linear

#: Bytes of logits and temporaries at a time.
BUDGET = 96 << 20
#: Tensors of a slice's size that exist at once: logits in the model's dtype and in float32, exponentials, products.
_COPIES = 6
_SLICE = 4096


class Lens:
    """A stack's final norm and head, evaluated by slices of the vocabulary."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        linear = getattr(self._head, "head", None)
        self._linear = linear if isinstance(self._head, LmHead) and type(linear) is nn.Linear else None

    @property
    def sliceable(self) -> bool:
        """Whether slices can be computed separately.

        A head with an adapter is computed whole, for fewer tokens at a time.
        """
        return self._linear is not None

    def vocabulary(self, hidden: Tensor) -> int:
        """Return the size of the vocabulary.

        Args:
            hidden: Any states [.., width]; one is evaluated if the head cannot be sliced.
        """
        return (
            int(self._head(hidden.flatten(0, -2)[:1]).shape[-1]) if self._linear is None else self._linear.out_features
        )

    def ready(self, hidden: Tensor) -> Tensor:
        """Compute the input of `logits`: [.., width] -> [.., width of the head].

        If the head cannot be sliced, these are all logits.
        """
        if self._linear is None or not isinstance(self._head, LmHead):
            whole: Tensor = self._head(hidden)
            return whole
        if self._head.norm is not None:
            hidden = self._head.norm(hidden)
        return hidden if self._head.project is None else self._head.project(hidden)

    def logits(self, ready: Tensor, lo: int, hi: int) -> Tensor:
        """Return the logits of tokens [lo, hi): float32 [.., hi - lo], equal to the whole head's."""
        if self._linear is None or not isinstance(self._head, LmHead):
            return ready[..., lo:hi].float()
        bias = None if self._linear.bias is None else self._linear.bias[lo:hi]
        logits = linear(ready, self._linear.weight[lo:hi], bias)
        if self._head.softcap is not None:
            logits = torch.tanh(logits / self._head.softcap) * self._head.softcap
        return logits.float()


@dataclass(frozen=True)
class Alike:
    """Similarity of two models' distributions, per token.

    Fields:
        cosine: [pairs, tokens].
        kl_ab: Nats, [pairs, tokens]; `kl_ba` likewise.
        agreement: 1 if both have the same likeliest token, [pairs, tokens].
        matrix: Cosines of every position of a with every position of b, [positions a, positions b, tokens], if
            requested.
        right: 1 if b's likeliest token is the target, [pairs, tokens]; None without targets.
        told: b's log-probability of the target, nats, [pairs, tokens]; None without targets.
    """

    cosine: Tensor
    kl_ab: Tensor
    kl_ba: Tensor
    agreement: Tensor
    matrix: Tensor | None
    right: Tensor | None = None
    told: Tensor | None = None


def alike(
    a: Lens,
    b: Lens,
    hidden_a: Tensor,
    hidden_b: Tensor,
    pairs: Sequence[tuple[int, int]],
    vocabulary: int,
    matrix: bool = False,
    targets: Tensor | None = None,
) -> Alike:
    """Compare the distributions of hidden states, in as many steps as the memory budget requires.

    Args:
        hidden_a: [positions, tokens, width] of one model.
        hidden_b: Of the other model, of any width, over the same tokens.
        pairs: (position of a, position of b).
        vocabulary: Tokens [0, vocabulary) are compared: the common part if heads are padded.
        targets: Ids [tokens] of the next tokens.
    """
    sliced = a.sliceable and b.sliceable
    width = min(_SLICE, vocabulary) if sliced else vocabulary
    positions = hidden_a.shape[0] + hidden_b.shape[0]
    step = max(1, BUDGET // (_COPIES * 4 * width * positions))
    parts = []
    for lo in range(0, hidden_a.shape[1], step):
        of_these = None if targets is None else targets[lo : lo + step]
        sums = _Sums(a, b, hidden_a[:, lo : lo + step], hidden_b[:, lo : lo + step], pairs, matrix, of_these)
        for start in range(0, vocabulary, width):
            sums.add_(start, min(start + width, vocabulary))
        parts.append(sums.result())
    return _joined(parts)


def _joined(parts: Sequence[Alike]) -> Alike:
    def along(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts], dim=-1)

    def asked(name: str) -> Tensor | None:
        return None if getattr(parts[0], name) is None else along(name)

    return Alike(*map(along, ("cosine", "kl_ab", "kl_ba", "agreement")), *map(asked, ("matrix", "right", "told")))


class _Side:
    """One model's running maximum, sums and likeliest token, each [positions, tokens]."""

    def __init__(self, lens: Lens, hidden: Tensor, targets: Tensor | None = None) -> None:
        self._lens = lens
        self._ready = lens.ready(hidden)
        shape, device = hidden.shape[:2], hidden.device
        self._targets = None if targets is None else targets.expand(shape)
        self._aimed = torch.full(shape, torch.nan, device=device)
        self.top = torch.full(shape, -torch.inf, device=device)
        self.total = torch.zeros(shape, device=device)
        self.squares = torch.zeros(shape, device=device)
        self.best = torch.zeros(shape, dtype=torch.int64, device=device)

    def add_(self, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        """Add a slice.

        Returns its logits, their exponentials relative to the new maximum, and the factor that scales the old sums.
        """
        logits = self._lens.logits(self._ready, lo, hi)
        highest, where = logits.max(dim=-1)
        self.best = torch.where(highest > self.top, where + lo, self.best)
        if self._targets is not None:
            inside = (self._targets >= lo) & (self._targets < hi)
            wanted = logits.gather(-1, (self._targets - lo).clamp(0, hi - lo - 1).unsqueeze(-1)).squeeze(-1)
            self._aimed = torch.where(inside, wanted, self._aimed)
        top = torch.maximum(self.top, highest)
        shrink = torch.exp(self.top - top)
        powers = torch.exp(logits - top.unsqueeze(-1))
        self.total = self.total * shrink + powers.sum(-1)
        self.squares = self.squares * shrink * shrink + powers.square().sum(-1)
        self.top = top
        return logits, powers, shrink

    @property
    def normaliser(self) -> Tensor:
        """ln sum e^l."""
        return self.top + self.total.log()

    @property
    def right(self) -> Tensor | None:
        """1 if the likeliest token is the target."""
        return None if self._targets is None else (self.best == self._targets).float()

    @property
    def target_logprobs(self) -> Tensor | None:
        """Log-probability of the targets; nan without one."""
        return None if self._targets is None else self._aimed - self.normaliser


class _Sums:
    """Sums over slices for both models, over a few tokens."""

    def __init__(
        self,
        a: Lens,
        b: Lens,
        hidden_a: Tensor,
        hidden_b: Tensor,
        pairs: Sequence[tuple[int, int]],
        matrix: bool,
        targets: Tensor | None,
    ) -> None:
        self._a, self._b = _Side(a, hidden_a), _Side(b, hidden_b, targets)
        device, tokens = hidden_a.device, hidden_a.shape[1]
        self._of_a = torch.tensor([at for at, _ in pairs], device=device)
        self._of_b = torch.tensor([at for _, at in pairs], device=device)
        self._dot, self._ab, self._ba = torch.zeros(3, len(pairs), tokens, device=device)
        self._dots = torch.zeros(tokens, hidden_a.shape[0], hidden_b.shape[0], device=device) if matrix else None

    def add_(self, lo: int, hi: int) -> None:
        logits_a, powers_a, shrink_a = self._a.add_(lo, hi)
        logits_b, powers_b, shrink_b = self._b.add_(lo, hi)
        if self._dots is not None:
            self._dots = self._dots * (shrink_a.T.unsqueeze(2) * shrink_b.T.unsqueeze(1))
            self._dots += torch.einsum("inv,jnv->nij", powers_a, powers_b)
        for pair, (i, j) in enumerate(zip(self._of_a.tolist(), self._of_b.tolist(), strict=True)):
            apart = logits_a[i] - logits_b[j]
            self._dot[pair] = self._dot[pair] * shrink_a[i] * shrink_b[j] + (powers_a[i] * powers_b[j]).sum(-1)
            self._ab[pair] = self._ab[pair] * shrink_a[i] + (powers_a[i] * apart).sum(-1)
            self._ba[pair] = self._ba[pair] * shrink_b[j] - (powers_b[j] * apart).sum(-1)

    def result(self) -> Alike:
        a, b, i, j = self._a, self._b, self._of_a, self._of_b
        apart = a.normaliser[i] - b.normaliser[j]
        return Alike(
            cosine=_capped(self._dot * (a.squares[i] * b.squares[j]).rsqrt()),
            kl_ab=(self._ab / a.total[i] - apart).clamp_min(0),
            kl_ba=(self._ba / b.total[j] + apart).clamp_min(0),
            agreement=(a.best[i] == b.best[j]).float(),
            matrix=self._matrix(),
            right=None if b.right is None else b.right[j],
            told=None if b.target_logprobs is None else b.target_logprobs[j],
        )

    def _matrix(self) -> Tensor | None:
        if self._dots is None:
            return None
        return _capped(
            self._dots.permute(1, 2, 0) * self._a.squares.rsqrt().unsqueeze(1) * self._b.squares.rsqrt().unsqueeze(0)
        )


def _capped(cosine: Tensor) -> Tensor:
    """Limit a cosine to 1: rounding may exceed it slightly."""
    return cosine.clamp_max(1.0)
