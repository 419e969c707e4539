"""An engine without data: arrays have shapes but no bytes, tokens are all zero, and a step takes what the costs say.

Contract: implements `runtime.stages.StageEngine`. The weights that stages on the device have in common are there once and are read once per
step, for the rows of all of them together (BL-14); what a model's adapters add is charged to its own rows. `steps`: rows that decode more
tokens than one before they come back (strides). Where answers end says who asks (`max_tokens`, with `ignore_eos`).
It trusts its plans: it keeps no tables. It knows no clock; `load_ns` says what a load would take, and nothing waits here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from runtime.sim.costs import BlockCost, TableCost, Work, adapter_cost, table_cost
from runtime.sim.families import Family
from runtime.sim.hardware import Gpu, Server
from runtime.stages import Array, Likeness, Stage, StageResult
from runtime.types import EngineMemory, ModelSpec, Row, Sampled, StepPlan, StepResult

#: Bytes of a number of what travels: hidden states, and pages as they are.
_ITEMS = {"float16": 2, "uint8": 1}


class Hollow:
    """Bytes that are not there: only their number."""

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


@dataclass(slots=True)
class Host:
    """A server's memory: what was read from its disk once stays there."""

    server: Server
    known: set[str] = field(default_factory=set)

    def load_ns(self, name: str, nbytes: int) -> int:
        """To bring a named piece to one of the devices."""
        disk = 0
        if name not in self.known:
            self.known.add(name)
            disk = self.server.disk.latency + self.server.disk.busy_ns(nbytes)
        return disk + self.server.host.latency + self.server.host.busy_ns(nbytes)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A stage on the device. `pieces`: its blocks' costs by name, then its adapters'; `width`: of its hidden states; None behind the
    head."""

    spec: ModelSpec
    pieces: tuple[tuple[str, int, BlockCost], ...]
    array_width: int
    head: bool


class SimEngine:
    """Implements `runtime.stages.StageEngine`.

    Args:
        costs: of blocks by id, measured; for others the table's are taken.
    """

    def __init__(
        self, device: str, gpu: Gpu, family: Family, page_capacity: int, host: Host, costs: Mapping[str, BlockCost] | None = None
    ) -> None:
        self.device = device
        self.page_capacity = page_capacity
        self.page_bytes = family.page_bytes
        self._gpu = gpu
        self._family = family
        self._host = host
        self._costs: dict[str, BlockCost] = dict(costs or {})
        self._stages: dict[str, _Loaded] = {}
        self._held: dict[str, int] = {}
        self._compared = 0
        self._sizes: dict[str, int] = {}
        self._mixes: dict[tuple[str, ...], tuple[tuple[BlockCost, tuple[int, ...]], ...]] = {}
        self._arrays: dict[tuple[int, int], Array] = {}

    # -- weights -------------------------------------------------------------------------------------------------------

    def load_ns(self, stage: Stage) -> int:
        """What loading it would take now: bytes that are not on the device. Raises NotFound."""
        missing = [(name, nbytes) for name, nbytes, _ in self._pieces(stage) if name not in self._held]
        return sum(self._host.load_ns(name, nbytes) for name, nbytes in missing)

    def load(self, stage: Stage) -> ModelSpec:
        uses = self._family.uses(stage)
        if stage.id in self._stages:
            return self._stages[stage.id].spec
        chain = self._family.chain(stage.model)
        spec = replace(chain.spec, name=stage.id, kv_layers=sum(use.kv_layers for use in uses), blocks=tuple(use.block for use in uses))
        pieces = self._pieces(stage)
        for name, nbytes, _ in pieces:
            self._held[name] = self._held.get(name, 0) + 1
            self._sizes[name] = nbytes
        self._stages[stage.id] = _Loaded(spec, pieces, self._family.shape(stage.model).hidden, stage.hi == chain.length)
        self._mixes.clear()
        return spec

    def unload(self, stage: Stage) -> None:
        gone = self._stages.pop(stage.id, None)
        for name, _, _ in gone.pieces if gone is not None else ():
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name], self._sizes[name]
        self._mixes.clear()

    def memory(self) -> EngineMemory:
        unshared = sum(nbytes for stage in self._stages.values() for _, nbytes, _ in stage.pieces)
        return EngineMemory(sum(self._sizes.values()), unshared, self.page_capacity * self.page_bytes)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan, inputs: Mapping[str, Array], steps: Mapping[str, int] | None = None) -> StageResult:
        outputs: dict[str, Array] = {}
        sampled: list[Sampled] = []
        for row in plan.rows:
            stage = self._stages[row.model]
            if row.sample:
                sampled.append(Sampled(row.seq, 0))
            if not stage.head:
                outputs[row.seq] = self._hidden(len(row.tokens), stage.array_width)
        busy = self._strides(plan.rows, steps) if steps else self._ns(plan.rows)
        return StageResult(StepResult(plan.step, tuple(sampled), busy=busy), outputs)

    def _strides(self, rows: Sequence[Row], steps: Mapping[str, int]) -> int:
        """Rows run together until the shortest strides are over, then those that are left, and so on; chunks are of the first step."""
        busy, over = 0, 0
        for end in sorted({1, *(steps.get(row.seq, 1) for row in rows)}):
            left = [row for row in rows if steps.get(row.seq, 1) >= end]
            busy += self._ns(left, end - over, over)
            over = end
        return busy

    def _ns(self, rows: Iterable[Row], steps: int = 1, over: int = 0) -> int:
        """Nanoseconds of `steps` steps of rows that have made `over` steps of this stride already."""
        works: dict[str, Work] = {}
        for row in rows:
            work = works.get(row.model)
            if work is None:
                work = works[row.model] = Work()
            count = len(row.tokens)
            if over:
                work.add_row(row.start + count + over - 1, 1)
            elif count == 1:
                work.rows += 1
                work.context += row.start + 1
            else:
                work.add_row(row.start, count)
        if not works:
            return 0
        given = tuple(works.values())
        total = 0.0
        for cost, members in self._mix(tuple(works)):
            total += cost.ns(given[members[0]] if len(members) == 1 else _together(given, members), steps)
        return round(total) + steps * self._gpu.part_ns

    def _mix(self, stages: tuple[str, ...]) -> tuple[tuple[BlockCost, tuple[int, ...]], ...]:
        """Every piece that some stages have, once, with the places of those that have it."""
        found = self._mixes.get(stages)
        if found is None:
            members: dict[str, tuple[BlockCost, list[int]]] = {}
            for place, stage in enumerate(stages):
                for name, _, cost in self._stages[stage].pieces:
                    members.setdefault(name, (cost, []))[1].append(place)
            found = self._mixes[stages] = _joined((cost, tuple(places)) for cost, places in members.values())
        return found

    def _pieces(self, stage: Stage) -> tuple[tuple[str, int, BlockCost], ...]:
        """Name, bytes and cost of each block of a stage and of the adapters that its model has there."""
        found: list[tuple[str, int, BlockCost]] = []
        for use in self._family.uses(stage):
            part = self._family.parts[use.block]
            if use.block not in self._costs:
                self._costs[use.block] = table_cost(part.shape, part.lo, part.hi, self._gpu)
            found.append((use.block, part.block.nbytes, self._costs[use.block]))
            if use.adapter_bytes:
                layers = part.shape.attentions(part.lo, part.hi)
                found.append((f"{stage.model}+{use.block}", use.adapter_bytes, adapter_cost(use.adapter_bytes, layers, self._gpu)))
        return tuple(found)

    def _hidden(self, tokens: int, width: int) -> Array:
        array = self._arrays.get((tokens, width))
        if array is None:
            array = self._arrays[tokens, width] = _hollow("float16", (tokens, width))
        return array

    def alike(self, a: Array, b: Array) -> Likeness:
        """Nothing was computed: predictions are right as often as the paper's, 192 of 231, evenly."""
        self._compared += 192
        right = self._compared % 231 < 192
        return Likeness(False, 1.0 if right else 0.0)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def read_pages(self, pages: Sequence[int]) -> Array:
        return _hollow("uint8", (len(pages), self.page_bytes))

    def write_pages(self, pages: Sequence[int], data: Array) -> None:
        if data.shape != (len(pages), self.page_bytes):
            raise ValueError(f"{len(pages)} pages do not take {data.shape}")


def _hollow(dtype: str, shape: tuple[int, int]) -> Array:
    return Array(dtype, shape, Hollow(shape[0] * shape[1] * _ITEMS[dtype]))


def _joined(pieces: Iterable[tuple[BlockCost, tuple[int, ...]]]) -> tuple[tuple[BlockCost, tuple[int, ...]], ...]:
    """Pieces that the same stages have, as one where that is exact: fewer sums per step."""
    tables: dict[tuple[int, ...], TableCost] = {}
    others: list[tuple[BlockCost, tuple[int, ...]]] = []
    for cost, members in pieces:
        if not isinstance(cost, TableCost):
            others.append((cost, members))
            continue
        tables[members] = tables[members].plus(cost) if members in tables else cost
    return (*((cost, members) for members, cost in tables.items()), *others)


def _together(works: Sequence[Work], members: Sequence[int]) -> Work:
    total = Work()
    for place in members:
        total.add(works[place])
    return total
