"""Simulate a stage engine: arrays have shapes but no bytes, all tokens are zero, steps take the time that costs give.

- Weights that stages on the device have in common are there once and are read once per step, for the rows of all of
  them together (BL-14). A model's adapters are read for its own rows, and launched together with other models' adapters
  of their kind.
- `steps` of `run`: rows that decode more than one token before they return (strides).
- Answers end at `max_tokens` (requests use `ignore_eos`), or with a stop token after the length in `ends`.
- Plans are trusted: the engine keeps no page tables. It has no clock: how long a load takes is decided elsewhere
  (`sim.run.loading`), and how long other devices take for lent K and V, too (`sim.run.loans`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from runtime.chains import Array, Lack, Likeness, Stage, StageResult
from runtime.sim.cost.hardware import Gpu
from runtime.sim.cost.steps import Pricing, StepPiece
from runtime.sim.models.family import SimulatedFamily
from runtime.sim.models.shapes import ModelShape
from runtime.sim.run.pages_away import Lenders, PagesAway
from runtime.sim.workload.predictions import STOP
from runtime.types import EngineMemory, ModelSpec, Row, Sampled, StepPlan, StepResult

#: Bytes of a number by dtype: of hidden states, and of pages.
_ITEMS = {"float16": 2, "uint8": 1}


class Hollow:
    """A buffer with a size and no bytes."""

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> Hollow:
        return Hollow(len(range(*part.indices(self._size))))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A stage on the device. `layers`: with attention."""

    spec: ModelSpec
    pieces: tuple[StepPiece, ...]
    shape: ModelShape
    head: bool
    layers: int


class SimEngine:
    """A simulated device; implements `runtime.chains.StageEngine`.

    Args:
        pricing: Shared by devices of one kind; None: one of its own.
        right: Share of predictions that stand, spread evenly; default: the paper's.
        predicting: Share by which a predictor of lengths slows steps with prompts that it runs beside.
    """

    lacks: frozenset[Lack] = frozenset(["entry"])

    def __init__(
        self,
        device: str,
        gpu: Gpu,
        family: SimulatedFamily,
        page_capacity: int,
        pricing: Pricing | None = None,
        right: float = 192 / 231,
        ends: Mapping[str, int] = MappingProxyType({}),
        predicting: float = 0.0,
    ) -> None:
        self._ends = ends
        self._predicting = predicting
        self._right = right
        self.device = device
        self.page_capacity = page_capacity
        self.page_bytes = family.page_bytes
        self._family = family
        self.gpu = gpu
        self._pricing = pricing or Pricing(gpu, family)
        self._stages: dict[str, _Loaded] = {}
        self._held: dict[str, int] = {}
        self._compared = 0
        #: Time of all steps in which no kernel ran, in ns.
        self.launching = 0
        self._sizes: dict[str, int] = {}
        self._arrays: dict[tuple[int, int], Array] = {}
        self._away = PagesAway()
        self._lenders: Lenders | None = None

    def borrow(self, lenders: Lenders) -> None:
        """Attend to lent K and V through this from now on, as `runtime.loans.LoanEngine` does over a link."""
        self._lenders = lenders

    # -- weights -------------------------------------------------------------------------------------------------------

    def missing(self, stage: Stage) -> list[StepPiece]:
        """Return the pieces of a stage that are not on the device. Raises NotFound."""
        return [piece for piece in self._pricing.pieces(stage) if piece.name not in self._held]

    def load(self, stage: Stage) -> ModelSpec:
        uses = self._family.uses(stage)
        if stage.id in self._stages:
            return self._stages[stage.id].spec
        chain = self._family.chain(stage.model)
        spec = replace(
            chain.spec,
            name=stage.id,
            kv_layers=sum(use.kv_layers for use in uses),
            blocks=tuple(use.block for use in uses),
        )
        pieces = self._pricing.pieces(stage)
        for piece in pieces:
            self._held[piece.name] = self._held.get(piece.name, 0) + 1
            self._sizes[piece.name] = piece.nbytes
        shape = self._family.shape(stage.model)
        head, layers = stage.hi == chain.length, shape.attentions(stage.lo, stage.hi)
        self._stages[stage.id] = _Loaded(spec, pieces, shape, head, layers)
        return spec

    def unload(self, stage: Stage) -> None:
        gone = self._stages.pop(stage.id, None)
        for piece in gone.pieces if gone is not None else ():
            self._held[piece.name] -= 1
            if not self._held[piece.name]:
                del self._held[piece.name], self._sizes[piece.name]

    def second_lane(self) -> None:
        """Return None: the simulation defines the lanes."""

    def memory(self) -> EngineMemory:
        unshared = sum(piece.nbytes for stage in self._stages.values() for piece in stage.pieces)
        return EngineMemory(sum(self._sizes.values()), unshared, self.page_capacity * self.page_bytes)

    def return_pages(self, pages: Sequence[int]) -> None:
        """Do nothing: pages hold no data."""

    # -- steps ---------------------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan, inputs: Mapping[str, Array], steps: Mapping[str, int] | None = None) -> StageResult:
        outputs: dict[str, Array] = {}
        sampled: list[Sampled] = []
        for row in plan.rows:
            stage = self._stages[row.model]
            if row.sample:
                sampled.append(Sampled(row.seq, STOP if self._ends and self._is_last(row) else 0))
            if not stage.head:
                outputs[row.seq] = self._hidden(len(row.tokens), stage.shape.hidden)
        if plan.place_changes or self._away:
            self._away.follow(plan)
        if self._away and self._away.any_of(plan.rows):
            busy = self._run_apart(plan.rows, steps or {})
        else:
            busy = self._pricing.step(plan.rows, steps or {})
        if self._predicting and any(len(row.tokens) > 1 for row in plan.rows):
            busy = round(busy * (1 + self._predicting))
        self.launching += self._pricing.launching
        return StageResult(StepResult(plan.step, tuple(sampled), busy=busy), outputs)

    def _run_apart(self, rows: Sequence[Row], steps: Mapping[str, int]) -> int:
        """Return the ns of a step with rows of which other devices hold K and V. Raises ValueError without a way there.

        What a row attends to here counts as the whole context of the row; stages wait for the rest one after the other.
        """
        if self._lenders is None or any(count > 1 for count in steps.values()):
            raise ValueError("rows with lent K and V run token by token, on an engine that reaches their creditors")
        works, meanwhile = self._away.here(rows), self._away.here(rows, True)
        busy = self._pricing.price(works)
        for stage, asked in self._away.work_asked(rows, {name: self._stages[name].layers for name in works}).items():
            here = self._pricing.attention({stage: meanwhile[stage]})
            busy += self._lenders.wait(self.device, self._stages[stage].shape, asked, here, busy)
        return busy

    def _is_last(self, row: Row) -> bool:
        """Return whether a row samples the last token of an answer with a hidden length."""
        ends = self._ends.get(row.seq.partition("#")[0])
        return ends is not None and row.generated + 1 >= ends

    def _hidden(self, tokens: int, width: int) -> Array:
        array = self._arrays.get((tokens, width))
        if array is None:
            array = self._arrays[tokens, width] = _hollow("float16", (tokens, width))
        return array

    def alike(self, a: Array, b: Array) -> Likeness:
        """Compare a prediction with its output: nothing was computed, so the share `right` of them stands."""
        self._compared += 1
        right = int(self._compared * self._right + 1e-9) > int((self._compared - 1) * self._right + 1e-9)
        return Likeness(False, 1.0 if right else 0.0)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def read_pages(self, pages: Sequence[int]) -> Array:
        return _hollow("uint8", (len(pages), self.page_bytes))

    def write_pages(self, pages: Sequence[int], data: Array) -> None:
        if data.shape != (len(pages), self.page_bytes):
            raise ValueError(f"{len(pages)} pages do not take {data.shape}")


def _hollow(dtype: str, shape: tuple[int, int]) -> Array:
    return Array(dtype, shape, Hollow(shape[0] * shape[1] * _ITEMS[dtype]))


def hollow_rows(pieces: Sequence[tuple[Array, int, int]]) -> Array:
    """Concatenate rows [first, last) of arrays of one dtype and width."""
    like = pieces[0][0]
    return _hollow(like.dtype, (sum(last - first for _, first, last in pieces), like.shape[1]))
