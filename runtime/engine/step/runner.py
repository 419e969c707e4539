"""Run one step: all rows of all models, segment by segment.

    plan.rows --by model--> ids, positions, spans --segments--> hidden states --head, wanted rows only--> logits -->
    tokens

Hidden states are kept by model. A segment joins those of its models, runs its units once over all of them, and splits
the result. Rows of a model stay together and models keep one order, so both are slices.

After a model's last attention layer only tokens with wanted logits go on: of a prompt's chunk the last one, or none. A
stage without the embedding starts from hidden states that its rows bring; one without the head ends with the hidden
states of all its tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from runtime.chains import LayerWatch
from runtime.engine.models.components import SharedComponent
from runtime.engine.sampling.choice import TokenChoice
from runtime.engine.sampling.output import Outcome, Sampling, picks_of, sampling_of, wanted_of
from runtime.engine.sampling.row_request import PooledStates
from runtime.engine.sampling.sampler import STOCK
from runtime.engine.step.batch import ContextSource, ModelBatch, RowChunk, StepProgram, adapter_spans
from runtime.engine.step.context import AdapterMix, AttentionBackend, ForwardContext, Kept, PagedMetadata, running
from runtime.engine.step.probing import StepProbes
from runtime.engine.step.segments import Segment, cut_segment, plan_segments, told_apart
from runtime.kv.transfers import put
from runtime.types import SegmentRun
from surgery.modules.components import LmHead, Where

#: By model: the key of the adapter on a unit, and which attention layer it is; None where there is none.
_Keys = tuple[str | None, ...]
_Layers = tuple[int | None, ...]


@functools.lru_cache(maxsize=256)
def _segments(chains: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[Segment, ...]:
    return plan_segments(dict(chains))


def segments_of(batches: Mapping[str, ModelBatch]) -> tuple[Segment, ...]:
    """Return the segments that a step over these models runs, in order."""
    return _segments(tuple((name, batch.model.chain) for name, batch in batches.items()))


@dataclass(frozen=True, slots=True)
class Call:
    """Units [at, end) of a segment that ran in one call, with its arguments. `key`: the rotary module of `rotary`."""

    program: StepProgram
    at: int
    end: int
    frame: ForwardContext
    attention: AttentionBackend | None
    layers: Sequence[int | None]
    key: str | None
    rotary: tuple[Tensor, Tensor] | None

    @property
    def paging(self) -> PagedMetadata | None:
        return None if self.attention is None else self.attention.paging


class StepRun:
    """The state of one step while it runs.

    Args:
        trace: Whether `segments` records what runs.
        picks: Tokens with wanted logits, by model, if they do not follow from the rows; then nothing is sampled.
        kept: Joined adapters of a step that is recorded (`engine.step.context.Kept`).
        mix: Which adapter each token uses, in a recorded step over rows of any models with the same chain.
        watch: Called behind each attention layer of a step with chunks.

    Attributes:
        segments: The segments that ran, if traced.
        calls: The units that ran in one call.
        saved: Hidden states [tokens, width] that rows ask for (`Row.saves`), by model and by unit that they enter.
        probes: Forecasts that rows ask for (`Row.probed`).
        pooled: Sums of final hidden states, for requests that ask for them.
    """

    def __init__(
        self,
        batches: Mapping[str, ModelBatch],
        frames: ContextSource,
        device: torch.device,
        trace: bool,
        picks: Mapping[str, Sequence[int]] | None = None,
        kept: Kept | None = None,
        mix: AdapterMix | None = None,
        watch: LayerWatch | None = None,
    ) -> None:
        self._device = device
        self._trace = trace
        self.segments: list[SegmentRun] = []
        self.calls: list[Call] = []
        self._saves = {name: batch.saves for name, batch in batches.items() if batch.saves}
        self.saved: dict[str, dict[int, Tensor]] = {name: {} for name in self._saves}
        self.probes = StepProbes(batches)
        self._cuts = {
            name: self._saves.get(name, frozenset()) | self.probes.cuts.get(name, frozenset())
            for name in (*self._saves, *self.probes.cuts)
        }
        self._batches = batches
        self._wanted = {name: wanted_of(batch) for name, batch in batches.items()} if picks is None else {}
        self._picks = (
            {name: picks_of(batches[name], wanted) for name, wanted in self._wanted.items()} if picks is None else picks
        )
        self._kept, self._mix = kept, mix
        self._narrows = any(len(own) < batches[name].tokens for name, own in self._picks.items())
        self._narrowed: set[str] = set()
        # Without chunks all layers may run in one call: rows without wanted logits are dropped after it. With chunks
        # there are many of these, and a call ends where they are dropped.
        self._chunks = picks is not None or any(len(row.tokens) > 1 for batch in batches.values() for row in batch.rows)
        self._watch = watch if self._chunks else None
        self._passed: dict[str, int] = {}  # by model: attention layers that have run
        self._frames = frames
        self._pools = any(want.pooled is not None for own in self._wanted.values() for want in own)
        self.pooled: list[PooledStates] = []
        self._hidden = {name: batch.hidden for name, batch in batches.items() if batch.hidden is not None}
        self._logits: dict[str, Tensor] = {}

    def execute(self, choice: TokenChoice = STOCK) -> Outcome:
        """Run every segment, sample, and wait for the tokens. `choice`: how tokens are chosen."""
        return self.sample(choice).read()

    def sample(self, choice: TokenChoice = STOCK, before: Sampling | None = None, defers: bool = False) -> Sampling:
        """Run every segment and sample, without waiting for the tokens.

        Args:
            choice: How tokens are chosen.
            before: Sampling of the step before (`engine.sampling.output`).
            defers: Rows may be left out (`sampling_of`).
        """
        made = sampling_of(self._batches, self._wanted, self.forward(), choice, before, defers)
        made.add_prompt(self.pooled)
        return made

    def forward(self) -> Mapping[str, Tensor]:
        """Run every segment; return the logits [wanted rows, vocabulary] by model, for models that want any."""
        for segment in segments_of(self._batches):
            for piece in cut_segment(segment, self._cuts) if self._cuts else (segment,):
                self._run(piece)
                if self._cuts:
                    self._save(piece)
        return self._logits

    @property
    def behind(self) -> Mapping[str, Tensor]:
        """Hidden states [1, tokens, width] after the step, of models without a head."""
        return {name: self._hidden[name] for name, batch in self._batches.items() if not batch.model.has_head}

    def run_part(self, name: str, lo: int, hi: int, hidden: Tensor | None = None) -> Tensor:
        """Run components [lo, hi) of one model alone, over its rows. Used to time them for a profile.

        Args:
            hidden: Hidden states [1, tokens, width] to start from. None if `lo` is the embedding, or to go on from the
                last call.

        Returns:
            The hidden states after them; after the head, the logits [rows, vocabulary].
        """
        self._narrows = False
        if hidden is not None:
            self._hidden[name] = hidden
        chain = self._batches[name].model.chain
        self._run(Segment((name,), chain[lo:hi], (lo,)))
        return self._hidden[name] if hi < len(chain) else self._logits[name]

    def _save(self, segment: Segment) -> None:
        """Copy the hidden states behind a segment for rows that ask for them, or forecast from them.

        Later units may write in place.
        """
        for name, start in zip(segment.models, segment.starts, strict=True):
            at = start + len(segment.units)
            if at in self.probes.cuts.get(name, ()):
                self.probes.read(name, at, self._hidden[name])
            if at in self._saves.get(name, ()):
                dtype = self._batches[name].model.dtype
                self.saved[name][at] = self._hidden[name][0].to(dtype, copy=True)

    # -- segments ------------------------------------------------------------------------------------------------------

    def _run(self, segment: Segment) -> None:
        batches = [self._batches[name] for name in segment.models]
        start, count = segment.starts[0], len(segment.units)
        units = batches[0].model.units[start : start + count]
        hidden = self._joined(segment, units[0])
        uses = list(zip(units, *self._uses(segment), strict=True))
        at = 0
        while at < count:
            unit, adapters, layers = uses[at]
            if self._narrows:
                hidden = self._narrow(segment, at, hidden)
            if unit.kind == "lm_head":
                self._run_head(unit, segment, adapters, hidden)
            if unit.kind == "lm_head" or not hidden.shape[1]:
                break
            ahead = self._run_ahead(segment, uses[: self._end_of_call(segment)], at, hidden)
            hidden, at = ahead or (self._run_unit(unit, segment, adapters, layers, hidden), at + 1)
            if self._watch is not None and unit.attends:
                self._passed |= {
                    name: layer + 1 for name, layer in zip(segment.models, layers, strict=True) if layer is not None
                }
                self._watch(self._rows_passed)
        else:
            parts = torch.split(hidden, [self._width(name) for name in segment.models], dim=1)
            self._hidden.update(zip(segment.models, parts, strict=True))
        if self._trace:
            self._record(segment, units, batches)

    def _end_of_call(self, segment: Segment) -> int:
        """Return before which unit one call for several units ends; 0: there is none."""
        if self._watch is not None or self._narrowed:  # a call neither reports layers nor has dropped tokens' places
            return 0
        if not (self._narrows and self._chunks):
            return len(segment.units)
        starts = zip(segment.models, segment.starts, strict=True)
        return max(0, min(self._batches[name].model.drops_from - start for name, start in starts))

    def _rows_passed(self) -> Mapping[str, int]:
        """Return how many attention layers each row has passed."""
        return {row.seq: layers for name, layers in self._passed.items() for row in self._batches[name].rows}

    def _joined(self, segment: Segment, first: SharedComponent) -> Tensor:
        """Return a segment's input: token ids [1, tokens] for an embedding, else hidden states [1, tokens, width]."""
        if first.kind == "embedding":
            return self._frames.ids(segment.models)
        every = [self._hidden[name] for name in segment.models if self._width(name)]
        parts = every or [self._hidden[name][:, :0] for name in segment.models[:1]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _width(self, name: str) -> int:
        """Return how many tokens of a model are still processed."""
        return len(self._picks[name]) if name in self._narrowed else self._batches[name].tokens

    def _narrow(self, segment: Segment, at: int, hidden: Tensor) -> Tensor:
        """Drop tokens that unit `at` and later ones do not need: without wanted logits, after the last attention."""
        starts = zip(segment.models, segment.starts, strict=True)
        ripe = {
            name
            for name, start in starts
            if name not in self._narrowed and start + at >= self._batches[name].model.drops_from
        }
        if not ripe:
            return hidden
        kept: list[int] = []
        base = 0
        for name in segment.models:
            own = self._picks[name] if name in ripe else range(self._width(name))
            kept.extend(base + index for index in own)
            base += self._width(name)
        self._narrowed |= ripe
        return hidden if len(kept) == hidden.shape[1] else hidden[:, put(kept, self._device)]

    def _behind(self, models: tuple[str, ...], adapters: _Keys) -> ForwardContext:
        """Return the context of models with dropped tokens."""
        parts = []
        for name in models:
            positions = self._frames.frame((name,), (None,)).positions
            picks = put(self._picks[name], self._device)
            parts.append(positions[:, picks] if name in self._narrowed else positions)
        return ForwardContext(
            torch.cat(parts, dim=1), (), adapter_spans(adapters, [self._width(name) for name in models])
        )

    def _run_unit(
        self, unit: SharedComponent, segment: Segment, adapters: _Keys, layers: _Layers, hidden: Tensor
    ) -> Tensor:
        if unit.masked:
            pieces = self._frames.pieces(segment.models, adapters, cast("tuple[int, ...]", layers), unit.rotary, hidden)
            return self._run_masked(unit, pieces, hidden)
        if unit.attends:
            frame = self._frames.for_layers(segment.models, adapters, cast("tuple[int, ...]", layers))
            frame.prefixes = unit.prefixes
        elif self._narrowed.isdisjoint(segment.models):
            frame = self._frames.frame(segment.models, adapters)
        else:
            frame = self._behind(segment.models, adapters)
        rotary = None if unit.rotary is None else self._frames.rotary(segment.models, unit.rotary, hidden)
        with running(frame):
            out: Tensor = unit.module(hidden, Where(frame.positions, rotary))
        return out

    def _run_ahead(
        self, segment: Segment, uses: Sequence[tuple[SharedComponent, _Keys, _Layers]], at: int, hidden: Tensor
    ) -> tuple[Tensor, int] | None:
        """Run several of these units in one call if possible; return hidden states and the index of the next unit."""
        call = self._call(segment, uses, at, hidden) if at < len(uses) else None
        if call is None:
            return None
        self.calls.append(call)
        return call.program.run(hidden, call.frame, call.attention, call.layers, call.rotary), call.end

    def _call(
        self, segment: Segment, uses: Sequence[tuple[SharedComponent, _Keys, _Layers]], at: int, hidden: Tensor
    ) -> Call | None:
        units = [unit for unit, _, _ in uses]
        found = self._frames.program(segment.models, segment.units[: len(units)], units, at)
        if found is None:
            return None
        program, end = found
        ran = uses[at:end]
        layers = [depths[0] for _, _, depths in ran]
        if any(keys != ran[0][1] for _, keys, _ in ran) or any(
            depth != depths[0] for _, _, depths in ran for depth in depths
        ):
            return None
        frame, attention, key, rotary = self._frames.frame(segment.models, ran[0][1]), None, None, None
        for unit, keys, depths in ran:
            if unit.attends:
                paged = self._frames.for_layers(segment.models, keys, cast("tuple[int, ...]", depths)).paging
                attention, key = paged[0] if len(paged) == 1 else None, unit.rotary
                rotary = None if key is None else self._frames.rotary(segment.models, key, hidden)
                break
        if not program.takes(hidden, frame, None if attention is None else attention.paging, rotary):
            return None
        return Call(program, at, end, frame, attention, layers, key, rotary)

    @staticmethod
    def _run_masked(unit: SharedComponent, pieces: Iterable[RowChunk], hidden: Tensor) -> Tensor:
        """Run a layer that needs a batch of rows and a mask, one model at a time."""
        parts = []
        for piece in pieces:
            with running(piece.frame):
                out = unit.module(hidden[0, piece.lo : piece.hi].view(piece.rows, -1, hidden.shape[-1]), piece.where)
            parts.append(out.reshape(1, -1, out.shape[-1]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _uses(self, segment: Segment) -> tuple[Iterable[_Keys], Iterable[_Layers]]:
        """Return, for each unit of a segment, each model's adapter on it and each model's attention layer number."""
        count = len(segment.units)
        models = [
            (self._batches[name].model, start) for name, start in zip(segment.models, segment.starts, strict=True)
        ]
        adapters = zip(*(model.adapters[start : start + count] for model, start in models), strict=True)
        return adapters, zip(*(model.kv_index[start : start + count] for model, start in models), strict=True)

    def _run_head(self, unit: SharedComponent, segment: Segment, adapters: _Keys, hidden: Tensor) -> None:
        """Run the head over the tokens with wanted logits."""
        counts = [len(self._picks[name]) for name in segment.models]
        if not sum(counts):
            return
        if hidden.shape[1] != sum(counts):  # `run_part`, which drops no tokens
            edges = itertools.accumulate((self._batches[name].tokens for name in segment.models), initial=0)
            picks = [
                base + index for name, base in zip(segment.models, edges, strict=False) for index in self._picks[name]
            ]
            hidden = hidden[:, put(picks, self._device)]
        if self._pools:
            hidden, counts = self._pool(unit, segment, hidden)
            if not sum(counts):
                return
        nowhere = torch.zeros((1, sum(counts)), dtype=torch.int64, device=self._device)
        spans = adapter_spans(adapters, counts) if self._mix is None else self._mix.spans
        with running(ForwardContext(nowhere, (), spans, kept=self._kept, mix=self._mix)):
            logits: Tensor = unit.module(hidden)
        self._logits.update(zip(segment.models, torch.split(logits[0], counts), strict=True))

    def _pool(self, unit: SharedComponent, segment: Segment, hidden: Tensor) -> tuple[Tensor, list[int]]:
        """Sum the final hidden states of rows that ask for them; return the other rows' tokens, and how many each model
        has of these.
        """
        head, at = cast(LmHead, unit.module), 0
        kept: list[int] = []
        counts: list[int] = []
        for name in segment.models:
            before = len(kept)
            for want in self._wanted[name]:
                lo, at = at, at + want.hi - want.lo
                if want.pooled is None:
                    kept.extend(range(lo, at))
                    continue
                total = head.states(hidden[:, lo:at])[0].float().sum(0)
                self.pooled.append(PooledStates(want.row.seq, want.pooled, at - lo, total))
            counts.append(len(kept) - before)
        return hidden[:, put(kept, self._device)], counts

    def _record(self, segment: Segment, units: Sequence[SharedComponent], batches: Sequence[ModelBatch]) -> None:
        """Record what ran, each stitch as an entry of its own."""
        start = segment.starts[0]
        layers = [placed.layer for placed in batches[0].model.manifest.components[start : start + len(units)]]
        for lo, hi in told_apart([unit.kind for unit in units]):
            self.segments.append(
                SegmentRun(
                    components=segment.units[lo:hi],
                    kind=units[lo].kind if hi - lo == 1 else "segment",
                    layers=tuple(layers[lo:hi]),
                    models=segment.models,
                    seqs=sum(len(batch.rows) for batch in batches),
                    tokens=sum(batch.tokens for batch in batches),
                )
            )
