"""Vocabulary distributions of hidden states, two models side by side, without ever holding a whole one (BL-05).

A model's own final norm and head turn the hidden states behind any of its components into logits; of those only
slices of the vocabulary are held at a time. What is kept per token are sums that grow slice by slice, each relative
to the largest logit so far:

    m  = max l          Z = sum e^(l - m)         Q = sum e^(2 (l - m))         cosine = D / sqrt(Q_a Q_b)
    D  = sum e^(l_a - m_a + l_b - m_b)            KL(a, b) = sum e^(l_a - m_a) (l_a - l_b) / Z_a - m_a - ln Z_a + m_b +
                                                  ln Z_b

The cosine needs no normaliser: it cancels. Memory is bounded by `BUDGET`, whatever the vocabulary. Knows nothing of
text or stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.modules.components import LmHead

#: Bytes of logits and what is made of them, at a time.
BUDGET = 96 << 20
#: Tensors of the size of a slice of logits that exist at once: logits in the model's dtype and in float32,
#: exponentials, products.
_COPIES = 6
_SLICE = 4096


class Lens:
    """A stack's final norm and head, read by slices of the vocabulary."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        linear = getattr(self._head, "head", None)
        self._linear = linear if isinstance(self._head, LmHead) and type(linear) is nn.Linear else None

    @property
    def sliceable(self) -> bool:
        """Whether slices cost no more than themselves; a head with an adapter is computed whole, for fewer tokens at a
        time.
        """
        return self._linear is not None

    def vocabulary(self, hidden: Tensor) -> int:
        """How many tokens it tells apart. `hidden`: any states [.., width], of which one is read where the head cannot
        be sliced.
        """
        return (
            int(self._head(hidden.flatten(0, -2)[:1]).shape[-1]) if self._linear is None else self._linear.out_features
        )

    def ready(self, hidden: Tensor) -> Tensor:
        """What slices are read from: [.., width] -> [.., width of the head], or all logits where the head cannot be
        sliced.
        """
        if self._linear is None or not isinstance(self._head, LmHead):
            whole: Tensor = self._head(hidden)
            return whole
        if self._head.norm is not None:
            hidden = self._head.norm(hidden)
        return hidden if self._head.project is None else self._head.project(hidden)

    def logits(self, ready: Tensor, lo: int, hi: int) -> Tensor:
        """Logits of tokens [lo, hi): float32 [.., hi - lo], as the whole head gives them."""
        if self._linear is None or not isinstance(self._head, LmHead):
            return ready[..., lo:hi].float()
        bias = None if self._linear.bias is None else self._linear.bias[lo:hi]
        logits = nn.functional.linear(ready, self._linear.weight[lo:hi], bias)
        if self._head.softcap is not None:
            logits = torch.tanh(logits / self._head.softcap) * self._head.softcap
        return logits.float()


@dataclass(frozen=True)
class Alike:
    """How alike two models' distributions are, per token.

    `cosine`, `kl_ab`, `kl_ba` (nats), `agreement` (1 where both would take the same token): [pairs, tokens]. `matrix`:
    cosines of every position of a with every position of b, [positions a, positions b, tokens], where it was asked for.
    `right` (1 where b's likeliest token is the target) and `told` (log-probability that b gives the target, nats):
    [pairs, tokens], where targets were given.
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
    """Compare the distributions of hidden states, in as many steps as memory asks for.

    Args:
        hidden_a: [positions, tokens, width] of one model; `hidden_b`: of the other, of any width, over the same tokens.
        pairs: (position of a, position of b).
        vocabulary: tokens [0, vocabulary) are compared: where heads are padded, what both have.
        targets: ids [tokens] that come next.
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
    """One model's running maximum, sums and likeliest token, [positions, tokens] each."""

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
        """Take in a slice: its logits, their exponentials over the new maximum, and the factor that old sums shrink
        by.
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
        """1 where the likeliest token is the target."""
        return None if self._targets is None else (self.best == self._targets).float()

    @property
    def target_logprobs(self) -> Tensor | None:
        """Log-probability of the targets; nan where there is none."""
        return None if self._targets is None else self._aimed - self.normaliser


class _Sums:
    """What grows slice by slice for both models, over a few tokens."""

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
    """Rounding may leave a cosine of equals a hair above one."""
    return cosine.clamp_max(1.0)
