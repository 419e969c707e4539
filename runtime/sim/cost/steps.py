"""Compute what a step of several models' stages costs on one kind of device: shared pieces once, for all rows together.

    stage -> pieces: its blocks, and its model's adapters in them
    rows -> work by stage -> sum over pieces of their cost

`Pricing` is a function of the family and the kind of device, so all devices of a kind share one, with its cache of the
pieces that sets of stages have in common (up to `_MOST` sets). Pieces that the same stages have are added into one cost
if that is exact. The time of a step does not depend on the order of its rows. Which stages are loaded where is not
tracked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from runtime.chains import BlockUse, Stage
from runtime.sim.cost.blocks import (
    BlockCost,
    BlockWork,
    TableCost,
    adapter_cost,
    launch_cost,
    prefix_cost,
    table_cost,
)
from runtime.sim.cost.hardware import Gpu
from runtime.sim.models.family import VIRTUAL, SimulatedFamily
from runtime.types import Row

#: Number of cached sets of stages; the cache is cleared when it is full.
_MOST = 4096


@dataclass(frozen=True, slots=True)
class StepPiece:
    """A block, one model's adapters in a block, or the launches of adapters."""

    name: str
    nbytes: int
    cost: BlockCost


@dataclass(frozen=True, slots=True)
class _Mix:
    """The pieces of a set of stages: each cost with the stages that have it.

    `launching`: ns of a step in which no kernel runs.
    """

    costs: tuple[tuple[BlockCost, tuple[str, ...]], ...]
    launching: int


class Pricing:
    """The cost of steps on one kind of device.

    Args:
        costs: Measured costs of blocks by id; other blocks are taken from the table.
    """

    def __init__(self, gpu: Gpu, family: SimulatedFamily, costs: Mapping[str, BlockCost] | None = None) -> None:
        self._gpu = gpu
        self._family = family
        self._costs: dict[str, BlockCost] = dict(costs or {})
        self._pieces: dict[str, tuple[StepPiece, ...]] = {}
        self._bits: dict[str, int] = {}
        self._mixes: dict[int, _Mix] = {}
        #: Time of the latest step in which the device waited for launches and the engine's own work, in ns.
        self.launching = 0

    def pieces(self, stage: Stage) -> tuple[StepPiece, ...]:
        """Return the pieces of a stage: its blocks, and its model's adapters in them. Raises NotFound."""
        known = self._pieces.get(stage.id)
        if known is None:
            known = tuple(self._make_pieces(stage))
            self._pieces[stage.id] = known
            self._bits[stage.id] = 1 << len(self._bits)
        return known

    def step(self, rows: Sequence[Row], strides: Mapping[str, int]) -> int:
        """Return the ns of a step; `pieces` must have been called for the rows' stages.

        `strides`: rows that decode more than one token, with their numbers. All rows run together until the shortest
        stride ends, then the remaining ones, and so on; chunks belong to the first step. Afterwards `launching` is the
        part in which no kernel ran.
        """
        works = _works(rows)
        if not strides:
            return self.price(works)
        self.launching = 0
        ends = [strides.get(row.seq, 1) for row in rows]
        marks = sorted({1, *ends})
        busy, over = self._ns(works, 1), 1
        if len(marks) == 1:
            return busy
        works = {}
        last: dict[int, list[Row]] = {}
        for row, end in zip(rows, ends, strict=True):
            if end > 1:
                last.setdefault(end, []).append(row)
                work = works.get(row.model)
                if work is None:
                    work = works[row.model] = BlockWork()
                work.rows += 1
                work.context += row.start + len(row.tokens) + over
        for end in marks[1:]:
            busy += self._ns(works, end - over)
            for work in works.values():
                work.context += work.rows * (end - over)
            for row in last[end]:
                work = works[row.model]
                work.rows -= 1
                work.context -= row.start + len(row.tokens) + end
                if not work.rows:
                    del works[row.model]
            over = end
        return busy

    def price(self, works: Mapping[str, BlockWork]) -> int:
        """Return the ns of a step of this work by stage, as `step` for its rows."""
        self.launching = 0
        return self._ns(works, 1)

    def attention(self, works: Mapping[str, BlockWork]) -> float:
        """Return the ns of a step's attention to K and V; 0 for blocks with measured costs."""
        return sum(
            piece.cost.attention(work)
            for stage, work in works.items()
            for piece in self._pieces[stage]
            if isinstance(piece.cost, TableCost)
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _ns(self, works: Mapping[str, BlockWork], steps: int) -> int:
        """Return the ns of `steps` steps of some work by stage."""
        if not works:
            return 0
        bits, key = self._bits, 0
        for stage in works:
            key |= bits[stage]
        mix = self._mixes.get(key)
        if mix is None:
            mix = self._mix(key)
        total = 0.0
        for cost, members in mix.costs:
            total += cost.ns(works[members[0]] if len(members) == 1 else _together(works, members), steps)
        self.launching += steps * mix.launching
        return round(total) + steps * self._gpu.part_ns

    def _mix(self, key: int) -> _Mix:
        """Collect every piece of a set of stages once, with the stages that have it."""
        if len(self._mixes) >= _MOST:
            self._mixes.clear()
        members: dict[str, tuple[BlockCost, list[str]]] = {}
        for stage, bit in self._bits.items():
            for piece in self._pieces[stage] if key & bit else ():
                members.setdefault(piece.name, (piece.cost, []))[1].append(stage)
        costs = _joined((cost, tuple(stages)) for cost, stages in members.values())
        found = self._mixes[key] = _Mix(costs, round(sum(cost.fixed for cost, _ in costs)) + self._gpu.part_ns)
        return found

    def _make_pieces(self, stage: Stage) -> Iterable[StepPiece]:
        for use in self._family.uses(stage):
            part = self._family.parts[use.block]
            if use.block not in self._costs:
                self._costs[use.block] = table_cost(part.shape, part.lo, part.hi, self._gpu).faster(part.speed)
            yield StepPiece(use.block, part.block.nbytes, self._costs[use.block])
            if use.adapter_bytes:
                yield from self._adapters(stage.model, use)

    def _adapters(self, model: str, use: BlockUse) -> Iterable[StepPiece]:
        """Return the pieces of one model's adapters in a block.

        Launches are shared by all models with adapters of one kind in the block, unless the family branches.
        """
        kind, name = self._family.chain(model).spec.kind, f"{model}+{use.block}"
        if kind in VIRTUAL:
            yield StepPiece(name, use.adapter_bytes, prefix_cost(use.adapter_bytes, self._gpu))
            return
        part = self._family.parts[use.block]
        with_whom = model if self._family.branching else kind
        yield StepPiece(name, use.adapter_bytes, adapter_cost(use.adapter_bytes, self._gpu))
        yield StepPiece(
            f"{with_whom} in {use.block}", 0, launch_cost(part.shape.attentions(part.lo, part.hi), self._gpu)
        )


def _works(rows: Iterable[Row]) -> dict[str, BlockWork]:
    """Return the work of a step's rows, by stage."""
    works: dict[str, BlockWork] = {}
    for row in rows:
        work = works.get(row.model)
        if work is None:
            work = works[row.model] = BlockWork()
        count = len(row.tokens)
        if count == 1:
            work.rows += 1
            work.context += row.start + 1
        else:
            work.add_row(row.start, count)
    return works


def _joined(pieces: Iterable[tuple[BlockCost, tuple[str, ...]]]) -> tuple[tuple[BlockCost, tuple[str, ...]], ...]:
    """Add up the costs of pieces that the same stages have, where that is exact: fewer sums per step."""
    tables: dict[tuple[str, ...], TableCost] = {}
    others: list[tuple[BlockCost, tuple[str, ...]]] = []
    for cost, members in pieces:
        if not isinstance(cost, TableCost):
            others.append((cost, members))
            continue
        tables[members] = tables[members].plus(cost) if members in tables else cost
    return (*((cost, members) for members, cost in tables.items()), *others)


def _together(works: Mapping[str, BlockWork], members: Iterable[str]) -> BlockWork:
    total = BlockWork()
    for stage in members:
        total.add(works[stage])
    return total
