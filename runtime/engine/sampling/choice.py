"""Choose a token from each row of logits: the highest, or a draw from what the row's cuts leave of its distribution.

A draw cuts the distribution at the scaled temperature by top-k, top-p and min-p, in that order; what equals the last
value that is left is left, too. Then it inverts the cumulative distribution, in the order of the vocabulary, at the
row's own number. So a row's token depends on nothing beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.engine.sampling.penalties import RowPenalties
from runtime.grammars.state import TokenMask
from runtime.kv.transfers import put, put_array

#: Tokens that a row with top-k of at most so many ranks, whatever its own number: the sums of its cut must not depend
#: on other rows.
_RANKED = 1024
#: The tokens that grammars allow, by row of logits.
Masks = Mapping[int, TokenMask]


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """What rows of logits are drawn by.

    Fields:
        rows: Which rows; the other fields are of these, in this order.
        temperature: Above 0.
        top_k: How many of the most likely tokens are left; 0 for all.
        top_p: Share of the mass that the most likely tokens reach, in (0, 1]; of what top-k leaves.
        min_p: Share of the highest probability below which tokens are dropped.
        numbers: In [0, 1).
    """

    rows: Sequence[int]
    temperature: Sequence[float]
    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float]
    numbers: Sequence[float]

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return what follows `rows` in its order, [rows]: float32, int64, float32, float32, float64."""
        return (
            put(self.temperature, device, torch.float32),
            put(self.top_k, device),
            put(self.top_p, device, torch.float32),
            put(self.min_p, device, torch.float32),
            put(self.numbers, device, torch.float64),
        )


#: For rows of which none is drawn.
NO_COLUMNS = SamplingColumns((), (), (), (), (), ())
#: For rows without grammars.
NO_MASKS: Masks = MappingProxyType({})


class TokenChoice(Protocol):
    """How a device chooses tokens."""

    def allow_(self, logits: Tensor, masks: Mapping[int, TokenMask]) -> None:
        """Set to minus infinity in place what a row's mask does not allow, by row of logits [rows, vocabulary]."""
        ...

    def penalise_(self, logits: Tensor, penalties: Sequence[RowPenalties]) -> None:
        """Apply penalties to rows of logits [rows, vocabulary] in float32, in place."""
        ...

    def scored(self, logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of float32 logits [rows, vocabulary].

        Those of the chosen tokens [rows]; the `count` highest of each row, best first, and their tokens [rows, count].
        """
        ...

    def chosen(self, logits: Tensor, by: SamplingColumns = NO_COLUMNS, masks: Masks = NO_MASKS) -> Tensor:
        """Return a token for each row of logits [rows, vocabulary] in float32, which may be modified.

        Of rows that are drawn a draw by their columns, and some token where there is no finite maximum; of the rest
        the first maximum, or with NaN the first NaN. A token that a row's mask does not allow counts as minus infinity.
        """
        ...


class StockChoice:
    """`TokenChoice` with torch."""

    def allow_(self, logits: Tensor, masks: Mapping[int, TokenMask]) -> None:
        if not masks:
            return
        width = logits.shape[1]
        # One operation for all rows: torch's threads would meet once per row, which costs more than the work.
        blocked = np.zeros(logits.shape, np.bool_)
        for row, words in masks.items():
            bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=min(width, 32 * len(words)))
            np.equal(bits, 0, out=blocked[row, : len(bits)])
            blocked[row, len(bits) :] = True
        logits.masked_fill_(torch.from_numpy(blocked).to(logits.device), -math.inf)

    def penalise_(self, logits: Tensor, penalties: Sequence[RowPenalties]) -> None:
        for each in penalties:
            row, ids = logits[each.row], put_array(each.ids, logits.device)
            values = row[ids]
            if each.repetition != 1.0:
                values = torch.where(values > 0, values / each.repetition, values * each.repetition)
            counts = put_array(each.counts, logits.device)
            row[ids] = values - (each.frequency * counts + each.presence * (counts > 0))

    def scored(self, logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        whole = torch.logsumexp(logits, dim=-1)
        best = torch.topk(logits, count, dim=-1)
        return logits.gather(1, chosen[:, None])[:, 0] - whole, best.values - whole[:, None], best.indices

    def chosen(self, logits: Tensor, by: SamplingColumns = NO_COLUMNS, masks: Masks = NO_MASKS) -> Tensor:
        self.allow_(logits, masks)
        if len(by.rows) == logits.shape[0]:  # and in their order
            return _drawn(logits, by)
        tokens = torch.argmax(logits, dim=-1)
        if by.rows:
            index = put(by.rows, logits.device)
            tokens[index] = _drawn(logits[index], by)
        return tokens


def _drawn(logits: Tensor, by: SamplingColumns) -> Tensor:
    """Draw from each row of logits [rows, vocabulary], without waiting for a GPU.

    The vocabulary is sorted only for rows with top-p or a large top-k: on a GPU the sort takes more time than all else.
    """
    temperature, top_k, top_p, min_p, numbers = by.tensors(logits.device)
    probabilities = torch.softmax(logits / temperature[:, None], dim=-1)
    least: Tensor | None = None
    if any(by.min_p):
        least = min_p[:, None] * probabilities.amax(-1, keepdim=True)
    for rows, ranked in _ranks(by):
        index = put(rows, logits.device)
        some = probabilities[index]
        values = (
            torch.topk(some, min(_RANKED, some.shape[1]), dim=-1).values
            if ranked
            else torch.sort(some, dim=-1, descending=True).values
        )
        cut = _last_left(values, top_k[index], top_p[index])
        least = torch.zeros_like(probabilities[:, :1]) if least is None else least
        least[index] = torch.maximum(least[index], cut)
    if least is not None:
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    # In float64: a draw must not depend on rounding. The number times the sum is below the sum, however it is rounded,
    # since a number is at most 1 - 2**-53: so the token has some mass.
    cumulated = probabilities.double().cumsum(-1)
    place = torch.searchsorted(cumulated, numbers[:, None] * cumulated[:, -1:], right=True)
    return place.clamp_(max=logits.shape[1] - 1)[:, 0]  # a row of NaN has no sum


def _ranks(by: SamplingColumns) -> list[tuple[list[int], bool]]:
    """Return the rows that are cut after the `_RANKED` most likely tokens are ranked, and those after all are."""
    few = [row for row, k in enumerate(by.top_k) if 0 < k <= _RANKED]
    all_ = [row for row, (k, p) in enumerate(zip(by.top_k, by.top_p, strict=True)) if k > _RANKED or (not k and p < 1)]
    return [(rows, ranked) for rows, ranked in ((few, True), (all_, False)) if rows]


def _last_left(values: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the last of the values [rows, ranked], in descending order, that top-k and top-p leave: [rows, 1]."""
    rank = torch.arange(values.shape[1], device=values.device)
    drop = (rank >= top_k[:, None]) & (top_k[:, None] > 0)
    left = torch.where(drop, torch.zeros_like(values), values)
    cumulated = left.cumsum(-1)  # not a sum as well: torch sums a long row in another order if it is alone
    before = (cumulated - left) / cumulated[:, -1:]
    drop = drop | ((before >= top_p[:, None]) & (top_p[:, None] < 1.0))
    drop[:, 0].fill_(False)
    return values.gather(1, (~drop).sum(-1, keepdim=True) - 1)
