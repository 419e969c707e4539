"""What executors have in common of a step's rows: whose they are, where their tokens stand in a frame, and what gives
frames.

Knows nothing of pages or of dense batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runtime.engine.models.components import SharedComponent
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.step.context import AdapterSpan, ForwardContext, PagedMetadata, RowSpan, VirtualSpan
from runtime.types import Row
from surgery.modules.components import Where


@dataclass(frozen=True, slots=True)
class Awaited:
    """Ids number `places` of a model's rows are `tokens` [places], which the host has not seen."""

    places: Sequence[int]
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """One model's rows in this step: where each one's tokens stand among the model's `tokens`, whose ids are `ids`.

    Spans beyond those of `rows` fill the batch up: what they compute is nobody's. `hidden`: what the tokens start from,
    [1, tokens, width], in a part of a chain that does not begin with the embedding. `awaited`: which of `ids` only the
    device has.
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


@dataclass(frozen=True, slots=True)
class RowChunk:
    """One model's part of a segment, for a layer that attends by itself: tokens [lo, hi) as `rows` rows."""

    lo: int
    hi: int
    rows: int
    frame: ForwardContext
    where: Where


class StepProgram(Protocol):
    """Units in one call (`engine.kernels.program`)."""

    def takes(
        self, hidden: Tensor, frame: ForwardContext, paging: PagedMetadata | None, rotary: tuple[Tensor, Tensor] | None
    ) -> bool:
        """Whether it can run over this frame, whose attention is over this paging, by these tables (None where nothing
        attends).
        """
        ...

    def run(
        self,
        hidden: Tensor,
        frame: ForwardContext,
        paging: PagedMetadata | None,
        layers: Sequence[int | None],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor: ...


class ContextSource(Protocol):
    """What a step runs on: a frame for each set of models that meet, whichever executor's. `FrameMaker` is the paged
    one.
    """

    def ids(self, models: tuple[str, ...]) -> Tensor:
        """Token ids [1, tokens] of these models' rows."""
        ...

    def frame(self, models: tuple[str, ...], adapters: tuple[str | None, ...]) -> ForwardContext: ...

    def for_layers(
        self, models: tuple[str, ...], adapters: tuple[str | None, ...], layers: tuple[int, ...]
    ) -> ForwardContext:
        """The frame for an attention layer that is number `layers[i]` of `models[i]`, set to run it."""
        ...

    def program(
        self, models: tuple[str, ...], key: tuple[str, ...], units: Sequence[SharedComponent], at: int
    ) -> tuple[StepProgram, int] | None:
        """What runs units [at, end) of a segment at once, and end. `models`: whose segment it is; `key`: the units'
        digests.
        """
        ...

    def rotary(self, models: tuple[str, ...], key: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) [1, tokens, width] for these models' tokens."""
        ...

    def pieces(
        self,
        models: tuple[str, ...],
        adapters: tuple[str | None, ...],
        layers: tuple[int, ...],
        rotary: str | None,
        like: Tensor,
    ) -> Iterator[RowChunk]:
        """The models one by one, for a layer that attends by itself. Raises RuntimeError where there are only pages."""
        ...


def virtual_spans(batches: Sequence[ModelBatch], adapters: Sequence[str | None]) -> tuple[VirtualSpan, ...]:
    """Which tokens of a frame of these stand at virtual positions; none once prompts have begun."""
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
    """Which tokens use which adapter, when each model has so many tokens."""
    spans, base = [], 0
    for adapter, count in zip(adapters, counts, strict=True):
        if adapter is not None and count:
            spans.append(AdapterSpan(adapter, base, base + count))
        base += count
    return tuple(spans)
