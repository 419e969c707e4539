"""The first and last component of a reused decode step, without modules: table lookup, head, and greedy tokens.

A step that repeats the call of the step before (`engine.step.decode_reuse`) has one token per row and the same rows, so
what modules look up in every step is looked up once. Each function returns None where only the modules can compute the
step: adapters on table or head, learned positions, soft caps, rows that are not greedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from runtime.engine.kernels.bindings import Kernels
from runtime.engine.layers.linear import SharedEmbedding, SharedLinear
from runtime.engine.layers.matmul import Product
from runtime.engine.layers.operations import NativeNorm
from runtime.engine.models.components import SharedComponent
from runtime.engine.sampling.row_request import draw_of
from runtime.engine.sampling.sampler import is_shaped
from runtime.engine.step.batch import ModelBatch
from surgery.modules.components import Embedding, LmHead
from surgery.modules.plain import EmbeddingTable

#: Modules whose output is their table's row.
_TABLES = (nn.Embedding, EmbeddingTable)


def plain_table(embedding: SharedComponent | None) -> Tensor | None:
    """Return the table [vocabulary, width] of a component that only looks tokens up, else None."""
    module = None if embedding is None else _inside(embedding.module)
    if not isinstance(module, Embedding) or module.project or module.position_table or module.norm:
        return None
    shared = module.table
    # Exact types: families scale or shift the output in subclasses of their own.
    if not isinstance(shared, SharedEmbedding) or shared.adapters or type(shared.table) not in _TABLES:
        return None
    return shared.table.weight.data


class PlainHead:
    """Final norm and head as two kernel calls. hidden [1, rows, width] -> logits [1, rows, vocabulary]."""

    def __init__(self, kernels: Kernels, norm: NativeNorm, product: Product) -> None:
        self._kernels, self._weight, self._eps, self._product = kernels, norm.stock.weight, norm.eps, product

    def largest(self, hidden: Tensor, blocked: Mapping[int, NDArray[np.bool_]]) -> list[int]:
        """Return each row's token with the highest logit, the first one of equals.

        `blocked`: by row, the tokens that its grammar forbids; also those behind the end.
        """
        logits = self._product.multiply(self._kernels.norm(hidden, self._weight, self._eps))[0]
        for row, mask in blocked.items():
            logits[row, : len(mask)].masked_fill_(torch.from_numpy(mask), -math.inf)
            logits[row, len(mask) :].fill_(-math.inf)
        tokens: list[int] = self._kernels.argmax(logits).tolist()
        return tokens


def plain_head(head: SharedComponent | None, kernels: Kernels | None) -> PlainHead | None:
    """Return the kernel calls of a head that is norm and product only, else None."""
    module = None if head is None else head.module
    if kernels is None or not isinstance(module, LmHead) or module.project or module.softcap is not None:
        return None
    norm, linear = module.norm, module.head
    if not isinstance(norm, NativeNorm) or not norm.ready or not isinstance(linear, SharedLinear) or linear.adapted:
        return None
    return PlainHead(kernels, norm, linear.product)


def is_greedy(batches: Iterable[ModelBatch]) -> bool:
    """Return whether the highest logit that its grammar allows, if it has one, is the token of every row.

    That is so in later steps, too, and nothing else is asked for.
    """
    for batch in batches:
        for row in batch.rows:
            draw = draw_of(batch.model, row)
            if not draw.params.greedy or draw.params.logprobs is not None or is_shaped(draw):
                return False
    return True


def table_rows(table: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the table's rows as hidden states [1, ids, width] in float32."""
    return table.index_select(0, torch.tensor(ids, dtype=torch.int64)).float()[None]


def _inside(module: nn.Module) -> nn.Module:
    inner = getattr(module, "module", None)
    return inner if isinstance(inner, nn.Module) else module
