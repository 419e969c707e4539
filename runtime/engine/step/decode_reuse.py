"""Run the decode steps of a persistent batch by repeating the call of the step before (native kernels).

    first step    rows -> layouts, contexts, paging -> components ... one call (`step.runner.Call`) ... head    (kept)
    later steps   the same rows, one token on -> embedding or inputs -> that call again (`ProgramReuse`) -> head

Embedding and head of later steps run without their modules where `engine.step.decode_ends` can compute them.

Building layouts and contexts for 32 rows costs more than a small part of a chain computes, and only positions change in
them from one decode step to the next. `StepPlan.batch` numbers the batch. Its steps can run this way if its rows are
one token each, of models with the same components, and if one call runs all components except embedding and head.

`follow` runs a step, or returns None if it has to run as usual. `remember_step` is called after each step that ran as
usual, `clear` when stages or adapters are loaded or dropped. New pages have to be in the tables before `follow` is
called; tables are read again when their `version` has changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.chains import Array, Stacked
from runtime.engine.kernels.program import Program
from runtime.engine.kernels.program_reuse import Attending, ProgramReuse, Room
from runtime.engine.layers.rotary import RotaryTables
from runtime.engine.models.components import ComponentPool, SharedComponent
from runtime.engine.models.loaded import LoadedModel
from runtime.engine.sampling.constraints import Constraint, MaskWork, prepare_masks
from runtime.engine.sampling.output import Outcome, sampling_of, wanted_of
from runtime.engine.step.batch import ModelBatch
from runtime.engine.step.context import ForwardContext, RowSpan, running
from runtime.engine.step.decode_ends import (
    AskedOfRows,
    asked_of,
    is_plain,
    is_slow,
    plain_head,
    plain_table,
    table_rows,
)
from runtime.engine.step.runner import Call, StepRun, segments_of
from runtime.engine.step.segments import Segment
from runtime.engine.tensors.convert import bytes_of, whole_of
from runtime.kv.transfers import put
from runtime.types import Row, Sampled, SegmentRun, StepPlan
from surgery.modules.components import Where

#: Batches that are kept.
_MOST = 8
#: Writes the hidden states that these rows start from, in this order, to a buffer. Raises ValueError for a wrong size.
Start = Callable[[Sequence[str], memoryview], None]


@dataclass(frozen=True, slots=True)
class ReusedPart:
    """One model's rows in a step.

    Fields:
        places: Indexes of the rows in the plan.
        lo, hi: Range of the rows among all rows that run together.
    """

    model: LoadedModel
    places: tuple[int, ...]
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class ReusedStep:
    """The results of a step.

    Fields:
        outcome: Sampled tokens and prompt log-probabilities.
        outputs: Hidden states of stages without a head, by table name.
        segments: Segments that ran, if traced.
    """

    outcome: Outcome
    outputs: Mapping[str, Array] = field(default_factory=dict)
    segments: tuple[SegmentRun, ...] = ()


@dataclass(slots=True)
class _Kept:
    """The last step of a batch, or the prepared call for the next one.

    Fields:
        names: Tables of its rows. (A batch may be split over devices and arrive here in parts.)
        start: Position of its first row in that step.
        ran: Batches and call of the step, if it ran as usual.
        course: The prepared call, after the first step that used it.
    """

    names: list[str]
    start: int
    ran: tuple[Mapping[str, ModelBatch], Call] | None
    course: _Course | None = None


class DecodeReuse:
    """The persistent batches of one device. Several may run in turn: those of the hops of a path that returns here."""

    def __init__(self, units: ComponentPool) -> None:
        self._units = units
        self._room = Room()
        self._kept: OrderedDict[tuple[int, str], _Kept] = OrderedDict()
        #: Number of steps that repeated the call of the step before.
        self.followed = 0

    def clear(self) -> None:
        """Drop all batches."""
        self._kept.clear()

    def remember_step(self, plan: StepPlan, batches: Mapping[str, ModelBatch], run: StepRun) -> None:
        """Keep a step that ran as usual, if the next one of its batch can repeat its call."""
        segments = segments_of(batches)
        if plan.batch and len(run.calls) == 1 and len(segments) == 1 and _is_plain(run.calls[0], segments[0], batches):
            names = [row.seq for row in plan.rows]
            self._store_step(plan, _Kept(names, plan.rows[0].start, (batches, run.calls[0])))

    def follow(self, plan: StepPlan, start: Start) -> ReusedStep | None:
        """Run a step of a batch that is kept; return None if it has to run as usual. Raises what `start` raises."""
        rows = plan.rows
        # Removed here, so that no step repeats one that fails now.
        kept = self._kept.pop((plan.batch, rows[0].seq), None) if plan.batch else None
        if kept is None or plan.opened or rows[0].start != kept.start + 1 or [row.seq for row in rows] != kept.names:
            return None
        if any([row.probed for row in rows]):  # noqa: C419
            return None  # the call has no place for a probe
        course = kept.course
        if course is not None and course.is_slow(rows):
            return None
        if course is None:
            course = None if kept.ran is None else _course(self._units, self._room, rows, *kept.ran)
            if course is None:
                return None
        made = course.run(rows, start, self._units)
        self._store_step(plan, _Kept(kept.names, rows[0].start, None, course))
        self.followed += 1
        return made

    def _store_step(self, plan: StepPlan, kept: _Kept) -> None:
        self._kept[plan.batch, plan.rows[0].seq] = kept
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)


def _is_plain(call: Call, segment: Segment, batches: Mapping[str, ModelBatch]) -> bool:
    """Return whether the next step can repeat this one.

    It can if one call ran everything except embedding and head, over rows of one token each, and if all rows sample
    where there is a head.
    """
    first = next(iter(batches.values())).model
    at, end = int(first.has_embedding), len(segment.units) - int(first.has_head)
    return (
        (call.at, call.end) == (at, end)
        and isinstance(call.program, Program)
        and call.paging is not None
        and all(
            batch.model.adapters[0] == batch.model.adapters[-1] == batch.model.adapters[at]
            for batch in batches.values()
        )
        and all(
            len(row.tokens) == 1 and row.start >= batch.model.spec.virtual_tokens
            for batch in batches.values()
            for row in batch.rows
        )
        and (not first.has_head or all(_all_sampled(batch) for batch in batches.values()))
        and not any(is_slow(batch.model, row) for batch in batches.values() for row in batch.rows)
    )


def _all_sampled(batch: ModelBatch) -> bool:
    wanted = wanted_of(batch)
    return len(wanted) == len(batch.rows) and all(one.row.sample for one in wanted)


class _Course:
    """The prepared call for steps over the same rows.

    Args:
        parts: In the order in which they run together.
        plain: Whether tokens are chosen from logits that are masked at most (`is_plain`).
    """

    def __init__(
        self,
        parts: Sequence[ReusedPart],
        onward: ProgramReuse,
        frame: ForwardContext,
        units: ComponentPool,
        plain: bool,
    ) -> None:
        self._parts, self._onward, first = tuple(parts), onward, parts[0].model
        self._embedding: SharedComponent | None = first.units[0] if first.has_embedding else None
        self._head: SharedComponent | None = first.units[-1] if first.has_head else None
        self._table = plain_table(self._embedding)
        self._plain_head = plain_head(self._head, units.kernels) if plain else None
        self._asked: AskedOfRows | None = None
        #: Of the last step's tokens; they start with the layers of the next one.
        self._masks: Sequence[MaskWork] = ()
        self._places = [place for part in parts for place in part.places]
        self._ordered = self._places == list(range(len(self._places)))
        self._frame, self._shape = frame, (1, frame.tokens, first.width)
        self._dtype, self._widened = first.dtype, first.widened
        counts = [part.hi - part.lo for part in parts]
        nowhere = torch.zeros((1, sum(counts)), dtype=torch.int64)
        self._names: tuple[str, ...] = ()
        # With a head the buffer is reused. Without one it is not: the next device may read it during the next step.
        self._hidden = _hidden(self._shape) if self._embedding is None and self._head is not None else None
        self._last = ForwardContext(nowhere, (), frame.adapters)

    def tables(self, rows: Sequence[Row]) -> Tensor:
        """Return the page tables of all rows [rows, layers, groups]."""
        self._versions = self._now()
        mine = self._in_order(rows)
        groups = max(part.model.tables.data.shape[2] for part in self._parts)
        tables = [part.model.pages([row.seq for row in mine[part.lo : part.hi]], groups) for part in self._parts]
        return tables[0] if len(tables) == 1 else torch.cat(tables)

    def is_slow(self, rows: Sequence[Row]) -> bool:
        """Return whether a step may have to go on without some of its rows (`StepPlan.defers`)."""
        mine = self._in_order(rows)
        return self._head is not None and self._asked_of(mine).is_slow(mine)

    def run(self, rows: Sequence[Row], start: Start, units: ComponentPool) -> ReusedStep:
        mine = self._in_order(rows)
        names = self._names = self._names or tuple([row.seq for row in mine])
        if self._versions != self._now():
            self._onward.tables(self.tables(rows))
        if self._embedding is None and self._widened:
            given = torch.empty(self._shape, dtype=self._dtype)
            start(names, bytes_of(given))
            hidden, data = given.float(), memoryview(b"")
        elif self._embedding is None:
            hidden, data = self._hidden or _hidden(self._shape)
            start(names, data)
        else:
            hidden = self._embedded(self._embedding, mine)
            data = hidden.numpy().data.cast("B")
        # Made before the layers run: after them the CPU caches are cold, and the next hop waits.
        through = (
            ReusedStep(Outcome((), ()), Stacked(names, Array("float32", self._shape[1:], data)))
            if self._head is None and not self._widened
            else None
        )
        for work in self._masks:
            work.start()
        self._onward.run(hidden)
        if through is not None:
            return through
        if self._head is None:
            return ReusedStep(Outcome((), ()), Stacked(names, whole_of(hidden.to(self._dtype))))
        if self._plain_head is not None:
            tokens = self._plain_head.tokens(hidden, *self._asked_of(mine).now(mine))
            return ReusedStep(Outcome(self._append_tokens(mine, tokens), ()))
        with running(self._last):
            logits: Tensor = self._head.module(hidden)
        batches = {part.model.spec.name: _batch(part, mine) for part in self._parts}
        wanted = {name: wanted_of(batch) for name, batch in batches.items()}
        apart = {part.model.spec.name: logits[0, part.lo : part.hi] for part in self._parts}
        return ReusedStep(sampling_of(batches, wanted, apart, units.operations).read())

    def _asked_of(self, mine: Sequence[Row]) -> AskedOfRows:
        if self._asked is None:  # rows stay, and so does what they ask for
            self._asked = asked_of([part.model for part in self._parts for _ in range(part.lo, part.hi)], mine)
        return self._asked

    def _now(self) -> list[int]:
        """Return the versions of the page tables, which grow with every change."""
        return [part.model.tables.version for part in self._parts]

    def _in_order(self, rows: Sequence[Row]) -> Sequence[Row]:
        return rows if self._ordered else [rows[place] for place in self._places]

    def _append_tokens(self, rows: Sequence[Row], tokens: Sequence[int]) -> tuple[Sampled, ...]:
        """Append a token to the output of each row's sequence, and return them."""
        sampled: list[Sampled] = []
        bound: list[tuple[Constraint, int, Sequence[int]]] = []
        for part in self._parts:
            sequences = part.model.sequences
            for at in range(part.lo, part.hi):
                row, token = rows[at], tokens[at]
                held = sequences[row.seq]
                del held.output[row.generated :]
                held.output.append(token)
                if held.constraint is not None:
                    bound.append((held.constraint, len(held.output) - 1, (token,)))
                sampled.append(Sampled(row.seq, token))
        if bound:
            self._masks = prepare_masks(bound, deferred=True)
        return tuple(sampled)

    def _embedded(self, embedding: SharedComponent, rows: Sequence[Row]) -> Tensor:
        if self._table is not None:
            return table_rows(self._table, [row.tokens[0] for row in rows])
        ids = put([row.tokens[0] for row in rows], torch.device("cpu"))[None]
        self._frame.positions = put([row.start for row in rows], torch.device("cpu"))[None]
        with running(self._frame):
            out: Tensor = embedding.module(ids, Where(self._frame.positions, None))
        return out.contiguous()


def _hidden(shape: tuple[int, int, int]) -> tuple[Tensor, memoryview]:
    """Return a tensor for hidden states, and its bytes."""
    hidden = torch.empty(shape)
    return hidden, hidden.numpy().data.cast("B")


def _batch(part: ReusedPart, rows: Sequence[Row]) -> ModelBatch:
    own = rows[part.lo : part.hi]
    return ModelBatch(
        part.model,
        tuple(own),
        tuple([RowSpan(at, at + 1, row.start) for at, row in enumerate(own)]),
        tuple([row.tokens[0] for row in own]),
    )


def _course(
    units: ComponentPool, room: Room, rows: Sequence[Row], batches: Mapping[str, ModelBatch], call: Call
) -> _Course | None:
    """Prepare to repeat the call of a step; return None if its rotary embedding has no lookup tables."""
    rotary = units.rotaries.get(call.key) if call.key is not None else None
    if not isinstance(rotary, RotaryTables) or call.paging is None or not isinstance(call.program, Program):
        return None
    places: dict[str, list[int]] = {name: [] for name in batches}
    for place, row in enumerate(rows):
        places[row.model].append(place)
    parts: list[ReusedPart] = []
    lo = 0
    for name, batch in batches.items():
        parts.append(ReusedPart(batch.model, tuple(places[name]), lo, lo + len(places[name])))
        lo += len(places[name])
    onward = ProgramReuse(call.program, room, call.frame, call.layers, Attending(call.paging, rotary))
    course = _Course(parts, onward, call.frame, units, is_plain(batches.values()))
    onward.tables(course.tables(rows))  # full width: the tables of a single step end at its longest row
    return course
