"""The first and last component of a reused decode step, without modules: table lookup, head, and the choice of tokens.

A step that repeats the call of the step before (`engine.step.decode_reuse`) has one token per row and the same rows, so
what modules look up in every step is looked up once. Each function returns None where only the modules can compute the
step: adapters on table or head, learned positions, soft caps, rows with penalties, biases or log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runtime.engine.kernels.bindings import Kernels
from runtime.engine.layers.linear import SharedEmbedding, SharedLinear
from runtime.engine.layers.matmul import Product
from runtime.engine.layers.operations import NativeNorm
from runtime.engine.models.components import SharedComponent
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.sampling.choice import NO_COLUMNS, Masks, SamplingColumns
from runtime.engine.sampling.row_request import draw_of
from runtime.engine.sampling.sampler import columns_of, is_shaped
from runtime.engine.step.batch import ModelBatch
from runtime.grammars.state import TokenMask
from runtime.types import Row, SamplingParams
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

    def tokens(self, hidden: Tensor, by: SamplingColumns, masks: Masks) -> list[int]:
        """Return each row's token (`TokenChoice.chosen`)."""
        logits = self._product.multiply(self._kernels.norm(hidden, self._weight, self._eps))[0]
        tokens: list[int] = self._kernels.logits.chosen(logits, by, masks).tolist()
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


def is_plain(batches: Iterable[ModelBatch]) -> bool:
    """Return whether every row's token is chosen from its own logits, masked at most, and nothing else is asked for.

    That is so in later steps, too.
    """
    for batch in batches:
        for row in batch.rows:
            draw = draw_of(batch.model, row)
            if draw.params.logprobs is not None or is_shaped(draw):
                return False
    return True


@dataclass(frozen=True, slots=True)
class AskedOfRows:
    """The rows with grammars, and those that are drawn, with their parameters."""

    bound: tuple[tuple[int, LoadedModel], ...]
    sampled: tuple[int, ...]
    params: tuple[SamplingParams, ...]

    def is_slow(self, rows: Sequence[Row]) -> bool:
        """Return whether the masks of some rows are slow."""
        return any([is_slow(model, rows[at]) for at, model in self.bound])  # noqa: C419

    def now(self, rows: Sequence[Row]) -> tuple[SamplingColumns, Masks]:
        """Return what rows are drawn by, and their masks."""
        masks: dict[int, TokenMask] = {}
        for at, model in self.bound:
            held = model.sequences[rows[at].seq]
            if held.constraint is not None:
                masks[at] = held.constraint.allowed(min(rows[at].generated, len(held.output)))
        if not self.sampled:
            return NO_COLUMNS, masks
        return columns_of(self.sampled, self.params, [rows[at].generated for at in self.sampled]), masks


def asked_of(models: Sequence[LoadedModel], rows: Sequence[Row]) -> AskedOfRows:
    """Return what rows of these models ask for; it is the same in later steps over the same sequences."""
    held = [model.sequences[row.seq] for model, row in zip(models, rows, strict=True)]
    sampled = tuple(at for at, one in enumerate(held) if not one.request.sampling.greedy)
    return AskedOfRows(
        tuple((at, models[at]) for at, one in enumerate(held) if one.constraint is not None),
        sampled,
        tuple(held[at].request.sampling for at in sampled),
    )


def is_slow(model: LoadedModel, row: Row) -> bool:
    """Return whether a row's masks are slow."""
    found = model.sequences[row.seq].constraint
    return found is not None and found.slow


def table_rows(table: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the table's rows as hidden states [1, ids, width] in float32."""
    return table.index_select(0, torch.tensor(ids, dtype=torch.int64)).float()[None]


def _inside(module: nn.Module) -> nn.Module:
    inner = getattr(module, "module", None)
    return inner if isinstance(inner, nn.Module) else module
