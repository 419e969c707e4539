"""Define a step's rows by model, and the interfaces through which a step gets forward contexts and programs.

All executors share this module; it depends neither on pages nor on dense batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runtime.engine.models.components import SharedComponent
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.step.context import (
    AdapterSpan,
    AttentionBackend,
    ForwardContext,
    PagedMetadata,
    RowSpan,
    VirtualSpan,
)
from runtime.types import Row, SentAway
from surgery.modules.components import Where


@dataclass(frozen=True, slots=True)
class Awaited:
    """Ids of a model that only the device has so far: those at `places` are `tokens`, which the step before samples."""

    places: Sequence[int]
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """One model's rows in a step.

    Fields:
        rows: The rows.
        spans: Places of the rows among the model's tokens. Spans beyond those of `rows` are padding.
        ids: Ids of all tokens.
        hidden: Hidden states that the tokens start from [1, tokens, width], if the stage does not begin with the
            embedding.
        awaited: The ids that are still on the device; None if there are none.

    Rows that enter or leave inside a stage (`Row.enters`, `layers`) are a batch of their own, of a view
    (`LoadedModel.part`).
    """

    model: LoadedModel
    rows: tuple[Row, ...]
    spans: tuple[RowSpan, ...]
    ids: tuple[int, ...]
    hidden: Tensor | None = None
    awaited: Awaited | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def away(self) -> dict[int, tuple[SentAway, ...]]:
        """What other devices hold of its rows, by the number of the row."""
        held = [self.model.sequences[row.seq].away for row in self.rows]
        return {at: loans for at, loans in enumerate(held) if loans}

    @property
    def saves(self) -> frozenset[int]:
        """Units, counted from the batch's first one, of which a row asks for the input."""
        return frozenset(at - row.enters for row in self.rows for at in row.saves)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Tokens [lo, hi) of a segment, all of one model, as `rows` rows: for layers that need a batch and a mask."""

    lo: int
    hi: int
    rows: int
    frame: ForwardContext
    where: Where


class StepProgram(Protocol):
    """Several units that run in one call (`engine.kernels.program`)."""

    def takes(
        self, hidden: Tensor, frame: ForwardContext, paging: PagedMetadata | None, rotary: tuple[Tensor, Tensor] | None
    ) -> bool:
        """Return whether it can run over this context.

        Args:
            paging: The pages that its attention reads; None if no unit attends.
            rotary: (cos, sin) for its attention; None if no unit attends.
        """
        ...

    def run(
        self,
        hidden: Tensor,
        frame: ForwardContext,
        attention: AttentionBackend | None,
        layers: Sequence[int | None],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor: ...


class ContextSource(Protocol):
    """Give a step its forward contexts: one for each set of models that run a segment together.

    `engine.step.layout.ContextBuilder` implements it over pages.
    """

    def ids(self, models: tuple[str, ...]) -> Tensor:
        """Return the token ids [1, tokens] of these models' rows."""
        ...

    def frame(self, models: tuple[str, ...], adapters: tuple[str | None, ...]) -> ForwardContext: ...

    def for_layers(
        self, models: tuple[str, ...], adapters: tuple[str | None, ...], layers: tuple[int, ...]
    ) -> ForwardContext:
        """Return the context, set to the attention layer that is number `layers[i]` of `models[i]`."""
        ...

    def program(
        self, models: tuple[str, ...], key: tuple[str, ...], units: Sequence[SharedComponent], at: int
    ) -> tuple[StepProgram, int] | None:
        """Return a program of units [at, end) of a segment, and end; None if there is none.

        Args:
            models: The models of the segment.
            key: Digests of its units.
        """
        ...

    def rotary(self, models: tuple[str, ...], key: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) [1, tokens, width] for these models' tokens. `key`: the rotary module."""
        ...

    def pieces(
        self,
        models: tuple[str, ...],
        adapters: tuple[str | None, ...],
        layers: tuple[int, ...],
        rotary: str | None,
        like: Tensor,
    ) -> Iterator[RowChunk]:
        """Yield the models one by one, for a layer that needs a batch of rows. Raises RuntimeError over pages."""
        ...


def virtual_spans(batches: Sequence[ModelBatch], adapters: Sequence[str | None]) -> tuple[VirtualSpan, ...]:
    """Return the tokens at virtual positions in a context of these batches; empty once all rows are past them."""
    found, base = [], 0
    for batch, adapter in zip(batches, adapters, strict=True):
        count = batch.model.spec.virtual_tokens
        for span in batch.spans:
            if adapter is not None and span.start < count:
                hi = min(span.hi, span.lo + count - span.start)
                found.append(VirtualSpan(adapter, base + span.lo, base + hi, span.start))
        base += batch.tokens
    return tuple(found)


def adapter_spans(adapters: Sequence[str | None], counts: Sequence[int]) -> tuple[AdapterSpan, ...]:
    """Return which tokens use which adapter. `counts`: tokens of each model.

    Neighbours with one adapter are one span: rows of a model that enter inside it follow its other rows.
    """
    spans: list[AdapterSpan] = []
    base = 0
    for adapter, count in zip(adapters, counts, strict=True):
        if adapter is not None and count:
            before = spans.pop() if spans and spans[-1].adapter == adapter and spans[-1].hi == base else None
            spans.append(AdapterSpan(adapter, base if before is None else before.lo, base + count))
        base += count
    return tuple(spans)
