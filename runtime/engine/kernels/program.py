"""Programs: half layers run by one call into C, because a step of a small model is mostly Python overhead.

    program_of(modules) -> Program      Program.run(hidden, frame, …) -> hidden

A program is made for neighbouring units with modules that are fused halves over packed weights. It computes the same as
these, by the same kernels. It can run only at one depth for all models, over rows of any length in pages of one size
(`run`), or over rows of one token in the cells of one dense batch (`run_cells`).

Where other devices hold pages of a row in some layers, the call asks them and goes on, if the backend has native calls
for these layers (`AttendsAway`). If not, or if an answer does not come soon, it stops between the layer's K and V and
its output, and attention there, or the rest of it, is the backend's (`engine.attention.away`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from runtime.engine.attention.interface import Tokens
from runtime.engine.kernels.away_calls import AwayCall
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.linear_groups import Grouped, spans_of
from runtime.engine.kernels.operands import Parts
from runtime.engine.kernels.paged_attention import NativeAttention, RowKinds
from runtime.engine.kernels.signatures import MOST_HEADS, MOST_WIDTH, Half, StepData
from runtime.engine.layers.fused import FusedAttention, FusedFfn
from runtime.engine.layers.operations import NativeNorm, NativeOperations
from runtime.engine.step.context import AttentionBackend, ForwardContext, PagedMetadata

_ATTENTION, _FFN = 0, 1


@dataclass(frozen=True, slots=True)
class _ProgramStep:
    """One half layer, its module, and the module's groups that it points to. Keeps them alive."""

    half: Half
    module: FusedAttention | FusedFfn
    into: Grouped
    out: Grouped

    @property
    def plain(self) -> bool:
        """Whether adapters here only add to products."""
        return not self.module.side and self.into.added_only and self.out.added_only


class Cells(Protocol):
    """K and V of a dense batch with one computed place per row (`engine.kernels.dense_attention`)."""

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row [rows], this one included."""
        ...

    def put(self, step: StepData, layer: int, like: Tensor) -> None:
        """Set the step's pointers to the store of a layer with K shaped like `like`, [.., kv_heads, head_dim]."""
        ...

    def clear(self, layers: Iterable[int], like: Tensor) -> None:
        """Zero what these layers have written to places without a token."""
        ...


class LayerAway(Protocol):
    """The native call of a layer of which other devices hold pages (`engine.attention.native_away.StepLayer`)."""

    @property
    def call(self) -> AwayCall: ...

    @property
    def beside(self) -> AttentionBackend | None:
        """Attention to the rows with all of their pages here; None if there are none."""
        ...


class LayersAway(Protocol):
    """The native calls of a step (`engine.attention.native_away.AwayStep`)."""

    def open(self) -> Mapping[int, LayerAway]:
        """Return what may be called now, by layer. Raises LoanLost."""
        ...

    def close(self, left: int | None) -> None:
        """Take it that the calls have run up to layer `left`, with the rest left to the backend.

        None: all of them have run, or the step has failed, with no question open.
        """
        ...


@runtime_checkable
class AttendsAway(Protocol):
    """An attention backend that may have native calls."""

    def prepare_calls(self, layers: Mapping[int, Tokens]) -> LayersAway | None:
        """Return the native calls of these layers, with what attends in each. Raises LoanLost, LoansMixed."""
        ...


class _ProgramWork:
    """The buffers of one run, and the step data that points to them."""

    def __init__(self, program: Program, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None) -> None:
        rows = hidden.shape[1]
        self.out = hidden.clone(memory_format=torch.contiguous_format)
        room, wide = torch.empty(rows * sum(program.room)), rows * program.room[0]
        self._wide, self._made = room[wide:], room[wide + rows * program.room[1] :]
        self.step = StepData(rows=rows, normed=room.data_ptr(), wide=self._wide.data_ptr(), made=self._made.data_ptr())
        if rotary is not None:
            self._cos, self._sin = rotary[0][0].contiguous(), rotary[1][0].contiguous()
            self.step.cosine, self.step.sine = self._cos.data_ptr(), self._sin.data_ptr()

    def attention(self, half: Half) -> tuple[Tensor, Tensor]:
        """Return the queries of a half that stopped before its attention, and the place of its result.

        Both are views [rows, heads, head_dim].
        """
        rows, width = self.step.rows, half.heads * half.dim
        query = self._wide[: rows * half.in_total].view(rows, half.in_total)[:, :width]
        return query.view(rows, half.heads, half.dim), self._made[: rows * width].view(rows, half.heads, half.dim)


class Program:
    """Neighbouring half layers that run in one call."""

    def __init__(self, kernels: Kernels, steps: Sequence[_ProgramStep]) -> None:
        self.kernels = kernels
        self._steps = tuple(steps)
        self._halves = (Half * len(steps))(*(step.half for step in steps))
        #: Floats per row: normed input, widest input products, and widest inputs of the output products.
        self.room = (
            max(step.half.width for step in steps),
            max(step.half.in_total for step in steps),
            max(step.half.out_inputs for step in steps),
        )
        self._geometries = sorted({(s.half.kv_heads, s.half.dim) for s in steps if s.half.kind == _ATTENTION})
        #: A tensor with the shape of one token's K; None where no half attends.
        dtype = torch.bfloat16 if any(step.half.narrow for step in steps) else torch.float32
        self.like = torch.empty((1, *self._geometries[0]), dtype=dtype) if self._geometries else None

    def takes(
        self, hidden: Tensor, frame: ForwardContext, paging: PagedMetadata | None, rotary: tuple[Tensor, Tensor] | None
    ) -> bool:
        """Return whether it can run over this forward context, with this paging and these rotary tables.

        `paging` and `rotary` may be None where no half attends.
        """
        if self._geometries and (paging is None or paging.tokens is not None):
            return False
        return self._plain(hidden, frame, rotary)

    def takes_cells(
        self, hidden: Tensor, frame: ForwardContext, cells: Cells | None, rotary: tuple[Tensor, Tensor] | None
    ) -> bool:
        """Return the same as `takes`, for K and V in cells."""
        if self._geometries and (cells is None or cells.lengths.numel() != frame.tokens):
            return False
        return self._plain(hidden, frame, rotary)

    def run(
        self,
        hidden: Tensor,
        frame: ForwardContext,
        attention: AttentionBackend | None,
        layers: Sequence[int | None],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Run on hidden [1, rows, width] and return the result in the same shape.

        Args:
            attention: What attends in layers of which other devices hold pages; its paging is that of all layers.
            layers: The number of each half's attention layer in the paging; None for an FFN.
        """
        work = _ProgramWork(self, hidden, rotary)
        step = work.step
        cuts: dict[int, int] = {}
        if attention is not None and self.like is not None:
            paging = attention.paging
            if paging.away:
                cuts = {at: layer for at, layer in enumerate(layers) if layer is not None and paging.is_away(layer)}
            pages, offsets = paging.token_pages.contiguous(), paging.token_offsets.contiguous()
            view = paging.view(self.like)
            step.k_pool, step.v_pool, step.narrow = view.k.data_ptr(), view.v.data_ptr(), view.k.dtype == torch.bfloat16
            step.page_stride, step.page_tokens = view.k.stride(0), paging.page_tokens
            step.token_pages, step.token_offsets = pages.data_ptr(), offsets.data_ptr()
            kinds = attention.kinds if isinstance(attention, NativeAttention) else RowKinds(paging)
            _set_rows(step, paging.tables, kinds)
        lows = self._adapters(frame, step, self._halves)
        _set_layers(self._halves, layers)
        if cuts and attention is not None:
            self._run_away(work, cuts, attention)
        else:
            self.kernels.layers_(work.out, self._halves, step)
        del lows
        return work.out

    def _run_away(self, work: _ProgramWork, cuts: Mapping[int, int], attention: AttentionBackend) -> None:
        """Run halves with layers of which other devices hold pages: `cuts`, by the number of the half."""
        calls = None
        if isinstance(attention, AttendsAway):
            calls = attention.prepare_calls({layer: self._tokens(at, work)[0] for at, layer in cuts.items()})
        lo: int | None = 0
        resumes = False
        while lo is not None:
            opened = calls.open() if calls is not None and (not resumes or max(cuts) > lo) else {}
            left, kept = None, _AwayHalves(self._halves, cuts, opened, work.step)  # kept: what the halves point to
            try:
                left = self.kernels.layers_(work.out, self._halves, work.step, lo, resumes=resumes)
            finally:
                if calls is not None:
                    calls.close(None if left is None else cuts[left])
            del kept
            if left is not None:
                self._attend(left, cuts[left], attention, work)
            lo, resumes = left, True

    def _attend(self, at: int, layer: int, attention: AttentionBackend, work: _ProgramWork) -> None:
        """Attend in a half that stopped before the end of its attention."""
        now, out = self._tokens(at, work)
        attention.decode(layer, now, out)
        attention.chunks(layer, now, out)

    def _tokens(self, at: int, work: _ProgramWork) -> tuple[Tokens, Tensor]:
        """Return what attends in a half, and where the result goes."""
        module = self._steps[at].module
        if self.like is None or not isinstance(module, FusedAttention):
            raise RuntimeError("a half that does not attend has no queries")
        query, out = work.attention(self._halves[at])
        like = self.like.expand(work.step.rows, -1, -1)  # K and V are in the pages
        return Tokens(query, like, like, module.how), out

    def run_cells(
        self,
        hidden: Tensor,
        frame: ForwardContext,
        cells: Cells | None,
        layers: Sequence[int | None],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Run with K and V in cells. One call per layer, because each layer has a store of its own."""
        work = _ProgramWork(self, hidden, rotary)
        lows = self._adapters(frame, work.step, self._halves)
        _set_layers(self._halves, [None] * len(layers))
        starts = [at for at, layer in enumerate(layers) if layer is not None]
        for lo, hi in zip([0, *starts], [*starts, len(layers)], strict=True):
            layer = layers[lo]
            if layer is not None and cells is not None and self.like is not None:
                cells.put(work.step, layer, self.like)
            if lo < hi:
                self.kernels.layers_(work.out, self._halves, work.step, lo, hi)
        if cells is not None and self.like is not None:
            cells.clear([layer for layer in layers if layer is not None], self.like)
        del lows
        return work.out

    def bound(
        self, frame: ForwardContext, layers: Sequence[int | None]
    ) -> tuple[ctypes.Array[Half], StepData, list[object]]:
        """Return a copy of the halves with these layers and adapters, and step data to complete.

        The third value is what must be kept alive as long as these are used.
        """
        step, halves = StepData(), (Half * len(self._steps))(*self._halves)
        alive = self._adapters(frame, step, halves)
        _set_layers(halves, layers)
        return halves, step, [self, frame, *alive]

    def _plain(self, hidden: Tensor, frame: ForwardContext, rotary: tuple[Tensor, Tensor] | None) -> bool:
        """Return whether everything but K and V is in a form that the kernels support."""
        if hidden.dtype != torch.float32 or frame.virtual or not all(step.plain for step in self._steps):
            return False
        if not self._geometries:
            return True
        if rotary is None or len(self._geometries) > 1:
            return False
        shape = (1, frame.tokens, self._geometries[0][1])
        return all(table.dtype == torch.float32 and table.shape == shape for table in rotary)

    def _adapters(self, frame: ForwardContext, data: StepData, halves: ctypes.Array[Half]) -> list[object]:
        """Point the step data and halves to the context's adapters; return what must be kept alive during the call."""
        if frame.adapters:
            bounds = spans_of(frame).bounds
            data.bounds, data.adapters = ctypes.addressof(bounds), len(frame.adapters)
        alive: list[object] = []
        for half, step in zip(halves, self._steps, strict=True):
            into, out = step.into.added.lows(frame), step.out.added.lows(frame)
            half.in_lows, half.out_lows = (None if low is None else low.address for low in (into, out))
            alive += [into, out]
        return alive


class _AwayHalves:
    """Has halves call other devices, or stop, at the layers of which these hold pages. Keeps alive what they point to.

    Args:
        cuts: These layers, by the number of the half.
        calls: What there is of native calls, by layer.
    """

    def __init__(
        self, halves: ctypes.Array[Half], cuts: Mapping[int, int], calls: Mapping[int, LayerAway], step: StepData
    ) -> None:
        self._others: dict[int, StepData] = {}
        self._calls = calls
        for at, layer in cuts.items():
            found = calls.get(layer)
            halves[at].stops, halves[at].away = found is None, None if found is None else found.call.address
            if found is not None and isinstance(found.beside, NativeAttention):
                found.call.attend_beside(self._step_of(found.beside, step))

    def _step_of(self, beside: NativeAttention, step: StepData) -> StepData:
        """Return the step data of the rows that have all of their pages here."""
        if (found := self._others.get(id(beside))) is None:
            found = self._others[id(beside)] = StepData.from_buffer_copy(step)
            _set_rows(found, beside.paging.tables, beside.kinds)
        return found


def _set_layers(halves: ctypes.Array[Half], layers: Sequence[int | None]) -> None:
    """Have halves attend in these layers of the pages, without other devices."""
    for half, layer in zip(halves, layers, strict=True):
        half.layer, half.stops, half.away = layer or 0, 0, None


def _set_rows(step: StepData, tables: Tensor, kinds: RowKinds) -> None:
    """Point the step data to page tables [rows, layers, groups], to chunks of prompts and to rows of one token."""
    step.tables, step.table_stride, step.layer_stride = tables.data_ptr(), tables.stride(0), tables.stride(1)
    step.lengths, step.chunks, step.chunk_count = kinds.lengths.data_ptr(), kinds.prompts.address, kinds.prompts.count
    if kinds.tokens is not None:
        step.singles, step.single_count = kinds.tokens.data_ptr(), kinds.tokens.numel()
        step.single_tables = None if kinds.rows is None else kinds.rows.data_ptr()


def program_of(modules: Sequence[nn.Module]) -> Program | None:
    """Return a program of these modules; None if the kernels do not support one of them."""
    steps = [_step(module) for module in modules]
    known = [step for step in steps if step is not None]
    if not known or len(known) < len(steps) or len({(step.half.width, step.half.narrow) for step in known}) > 1:
        return None
    ops = known[0].module.ops
    return Program(ops.kernels, known) if isinstance(ops, NativeOperations) else None


def _step(module: nn.Module) -> _ProgramStep | None:
    if not isinstance(module, FusedAttention | FusedFfn) or not isinstance(module.ops, NativeOperations):
        return None
    (first, last), norm = module.groups, module.norm
    if not (isinstance(first, Grouped) and isinstance(last, Grouped) and isinstance(norm, NativeNorm) and norm.ready):
        return None
    into, out = first.parts, last.parts
    if norm.stock.weight.numel() != into.inputs or out.outputs != into.inputs:
        return None
    half = Half(
        kind=_FFN,
        width=into.inputs,
        norm=norm.stock.weight.data_ptr(),
        eps=norm.eps,
        in_parts=into.address,
        out_parts=out.address,
        in_count=into.count,
        in_total=into.outputs,
        out_inputs=out.inputs,
        in_sizes=ctypes.addressof(into.widths),
        out_sizes=ctypes.addressof(out.widths),
        narrow=module.widened,
    )
    if any(not parts.coded and parts.narrow != module.widened for parts in (into, out)):
        return None
    if isinstance(module, FusedFfn):
        if into.sizes != (out.inputs, out.inputs):
            return None
    elif not _attends(half, module, into, out):
        return None
    return _ProgramStep(half, module, first, last)


def _attends(half: Half, module: FusedAttention, qkv: Parts, o: Parts) -> bool:
    """Fill in the attention fields of a half; return whether the kernels support it."""
    dim, how = module.head_dim, module.how
    half.kind, half.dim = _ATTENTION, dim
    half.heads, half.kv_heads = qkv.sizes[0] // dim, qkv.sizes[1] // dim
    half.window, half.scale = how.window or 0, how.factor(dim)
    if half.heads > MOST_HEADS or dim > MOST_WIDTH:
        return False
    kv = half.kv_heads * dim
    if qkv.sizes != (half.heads * dim, kv, kv) or o.inputs != half.heads * dim or half.heads % half.kv_heads or dim % 2:
        return False
    norms = (module.q_norm, module.k_norm)
    if norms == (None, None):
        return how.softcap is None
    if not all(isinstance(norm, NativeNorm) and norm.ready for norm in norms):
        return False
    q_norm, k_norm = (norm for norm in norms if isinstance(norm, NativeNorm))
    if q_norm.stock.weight.numel() != dim or k_norm.stock.weight.numel() != dim:
        return False
    half.q_norm, half.q_eps = q_norm.stock.weight.data_ptr(), q_norm.eps
    half.k_norm, half.k_eps = k_norm.stock.weight.data_ptr(), k_norm.eps
    return how.softcap is None
