"""Forward contexts over dense batches: the window of each model's KV store, row by row, one model after the other.

    tokens of a context:  model a: row 0's window | row 1's window | …   model b: …

Padding is part of it only where it is computed.

Shared layers run once over the tokens of all models; attention runs store by store. Which rows run is decided elsewhere
(`policy.batching.dense`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.engine.attention.interface import Tokens
from runtime.engine.dense.kv_store import DenseKV
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.dense_attention import NativeOnes
from runtime.engine.kernels.program import Program as CellProgram
from runtime.engine.models.components import ComponentPool, SharedComponent
from runtime.engine.step.batch import ModelBatch, RowChunk, StepProgram, adapter_spans, virtual_spans
from runtime.engine.step.context import AttentionBackend, ForwardContext, PagedMetadata, RowSpan
from surgery.modules.components import Where


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """One model's rows, including only the padding that is computed, and the KV store with their window."""

    rows: ModelBatch
    kv_store: DenseKV


@dataclass(frozen=True, slots=True)
class _Seen:
    """One KV store's part of a forward context: tokens [lo, hi), attending in the store's layer number `layer`."""

    kv_store: DenseKV
    lo: int
    hi: int
    layer: int


@dataclass(frozen=True, slots=True)
class _Slabs:
    """`engine.step.context.Dense`: attention over several KV stores."""

    parts: tuple[_Seen, ...]
    kernels: Kernels | None

    def attend(self, now: Tokens) -> Tensor:
        outs = []
        for part in self.parts:
            mine = slice(part.lo, part.hi)
            own = Tokens(now.query[mine], now.key[mine], now.value[mine], now.how)
            outs.append(part.kv_store.attend(part.layer, own, self.kernels))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


@dataclass(frozen=True, slots=True)
class _Cache:
    """One layer of a KV store, with the cache interface that layers which attend by themselves call.

    These layers pass the layer number of their own model; it is ignored here.
    """

    kv_store: DenseKV
    layer: int

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self.kv_store.write(self.layer, key, value)


@dataclass(frozen=True, slots=True)
class _Ones:
    """`engine.step.batch.StepProgram` over one model's KV store with a window one place wide."""

    made: CellProgram

    def takes(
        self, hidden: Tensor, frame: ForwardContext, paging: PagedMetadata | None, rotary: tuple[Tensor, Tensor] | None
    ) -> bool:
        return self.made.takes_cells(hidden, frame, _cells(frame), rotary)

    def run(
        self,
        hidden: Tensor,
        frame: ForwardContext,
        attention: AttentionBackend | None,
        layers: Sequence[int | None],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        return self.made.run_cells(hidden, frame, _cells(frame), layers, rotary)


def _cells(frame: ForwardContext) -> NativeOnes | None:
    parts = frame.dense.parts if isinstance(frame.dense, _Slabs) else ()
    return parts[0].kv_store.ones() if len(parts) == 1 else None


class DenseContexts:
    """`engine.step.batch.ContextSource` over the KV stores of these models, with open windows."""

    def __init__(self, batches: Mapping[str, PaddedBatch], units: ComponentPool) -> None:
        self._batches = batches
        self._units = units
        self._frames: dict[tuple[tuple[str, ...], tuple[str | None, ...]], ForwardContext] = {}
        self._rotaries: dict[tuple[str, str, torch.dtype], tuple[Tensor, Tensor]] = {}

    def ids(self, models: tuple[str, ...]) -> Tensor:
        return torch.tensor(
            [[token for name in models for token in self._batches[name].rows.ids]], device=self._units.device
        )

    def frame(self, models: tuple[str, ...], adapters: tuple[str | None, ...]) -> ForwardContext:
        made = self._frames.get((models, adapters))
        if made is None:
            rows = [self._batches[name].rows for name in models]
            positions = torch.cat([self._positions(name).flatten() for name in models])[None]
            spans: list[RowSpan] = []
            base = 0
            for each in rows:
                spans.extend(span.moved(base) for span in each.spans)
                base += each.tokens
            marked = adapter_spans(adapters, [each.tokens for each in rows])
            made = self._frames[models, adapters] = ForwardContext(
                positions, tuple(spans), marked, virtual_spans(rows, adapters)
            )
        return made

    def for_layers(
        self, models: tuple[str, ...], adapters: tuple[str | None, ...], layers: tuple[int, ...]
    ) -> ForwardContext:
        frame = self.frame(models, adapters)
        frame.dense = _Slabs(tuple(self._parts(models, layers)), self._units.kernels)
        return frame

    def program(
        self, models: tuple[str, ...], key: tuple[str, ...], units: Sequence[SharedComponent], at: int
    ) -> tuple[StepProgram, int] | None:
        if len(models) > 1 or self._batches[models[0]].kv_store.window.width > 1:
            return None
        found = self._units.programs.get_program(key, units, at)
        return None if found is None else (_Ones(found[0]), found[1])

    def rotary(self, models: tuple[str, ...], key: str, like: Tensor) -> tuple[Tensor, Tensor]:
        tables = [tuple(table.flatten(0, 1)[None] for table in self._tables(name, key, like)) for name in models]
        if len(tables) == 1:
            return tables[0][0], tables[0][1]
        return torch.cat([cos for cos, _ in tables], dim=1), torch.cat([sin for _, sin in tables], dim=1)

    def pieces(
        self,
        models: tuple[str, ...],
        adapters: tuple[str | None, ...],
        layers: tuple[int, ...],
        rotary: str | None,
        like: Tensor,
    ) -> Iterator[RowChunk]:
        for name, adapter, part in zip(models, adapters, self._parts(models, layers), strict=True):
            kv_store, tables = part.kv_store, None if rotary is None else self._tables(name, rotary, like)
            where = Where(
                self._positions(name),
                tables,
                kv_store.mask(None, like.dtype),
                _Cache(kv_store, part.layer),
                kv_store.keys,
            )
            yield RowChunk(part.lo, part.hi, kv_store.columns.rows, self.frame((name,), (adapter,)), where)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _positions(self, name: str) -> Tensor:
        """Return the positions [rows, width], or [1, computed] where only a part of the window is computed.

        Padding gets position 0, which every rotary table has.
        """
        window = self._batches[name].kv_store.window
        positions = window.positions.clamp_min(0)
        return positions if window.computed is None else positions.reshape(-1)[window.computed][None]

    def _tables(self, name: str, key: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) [rows, width, rotary width], computed once per model and step."""
        known = (name, key, like.dtype)
        if known not in self._rotaries:
            cos, sin = self._units.rotaries[key](like, self._positions(name))
            self._rotaries[known] = cos, sin
        return self._rotaries[known]

    def _parts(self, models: Sequence[str], layers: Sequence[int]) -> Iterator[_Seen]:
        base = 0
        for name, layer in zip(models, layers, strict=True):
            batch = self._batches[name]
            yield _Seen(batch.kv_store, base, base + batch.rows.tokens, layer)
            base += batch.rows.tokens
