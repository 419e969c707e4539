"""An engine without data: arrays have shapes but no bytes, tokens are all zero, and a step takes what the costs say.

Contract: implements `runtime.chains.StageEngine`. The weights that stages on the device have in common are there once
and are read once per step, for the rows of all of them together (BL-14). A model's adapters are read for its own rows,
and launched together with others of
their kind. `steps`: rows that decode more tokens than one before they come back (strides). Where answers end says who
asks (`max_tokens`, with `ignore_eos`).
It trusts its plans: it keeps no tables. It knows no clock; `loaded` says when a load would be over, and nothing waits
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from runtime.chains import Array, Lack, Likeness, Stage, StageResult
from runtime.sim.cost.hardware import Gpu, ServerSpec
from runtime.sim.cost.steps import Pricing, StepPiece
from runtime.sim.models.family import SimulatedFamily
from runtime.types import EngineMemory, ModelSpec, Sampled, StepPlan, StepResult

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
    """A server's memory: what was read from its disk stays there. `read`: when each piece is there whole."""

    server: ServerSpec
    read: dict[str, int] = field(default_factory=dict)

    def loaded(self, name: str, nbytes: int, begin: int) -> int:
        """When a named piece is on one of the devices, if that begins now: whoever comes while it is read waits for the
        same reading. One that another device will read later, behind its other loads, is read now."""
        now = begin + self.server.disk.latency + self.server.disk.busy_ns(nbytes)
        there = self.read[name] = min(self.read.get(name, now), now)
        return max(begin, there) + self.server.host.latency + self.server.host.busy_ns(nbytes)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A stage on the device. `array_width`: of its hidden states."""

    spec: ModelSpec
    pieces: tuple[StepPiece, ...]
    array_width: int
    head: bool


class SimEngine:
    """Implements `runtime.chains.StageEngine`.

    Args:
        pricing: of devices like this one, theirs together; one of its own where there is none.
        right: the part of predictions that are, evenly; by default as many as the paper's.
    """

    lacks: frozenset[Lack] = frozenset()

    def __init__(
        self,
        device: str,
        gpu: Gpu,
        family: SimulatedFamily,
        page_capacity: int,
        host: Host,
        pricing: Pricing | None = None,
        right: float = 192 / 231,
    ) -> None:
        self._right = right
        self.device = device
        self.page_capacity = page_capacity
        self.page_bytes = family.page_bytes
        self._family = family
        self._host = host
        self._pricing = pricing or Pricing(gpu, family)
        self._stages: dict[str, _Loaded] = {}
        self._held: dict[str, int] = {}
        self._compared = 0
        #: Of all steps: ns in which no kernel ran.
        self.launching = 0
        self._sizes: dict[str, int] = {}
        self._arrays: dict[tuple[int, int], Array] = {}

    # -- weights -------------------------------------------------------------------------------------------------------

    def loaded(self, stage: Stage, begin: int) -> int:
        """When it would be there if loading begins then, in ns: bytes that are not on the device, one piece after the
        other. Raises NotFound."""
        for piece in self._pricing.pieces(stage):
            if piece.name not in self._held:
                begin = self._host.loaded(piece.name, piece.nbytes, begin)
        return begin

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
        self._stages[stage.id] = _Loaded(spec, pieces, self._family.shape(stage.model).hidden, stage.hi == chain.length)
        return spec

    def unload(self, stage: Stage) -> None:
        gone = self._stages.pop(stage.id, None)
        for piece in gone.pieces if gone is not None else ():
            self._held[piece.name] -= 1
            if not self._held[piece.name]:
                del self._held[piece.name], self._sizes[piece.name]

    def second_lane(self) -> None:
        """Whoever runs this says what lanes there are."""

    def memory(self) -> EngineMemory:
        unshared = sum(piece.nbytes for stage in self._stages.values() for piece in stage.pieces)
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
        busy = self._pricing.step(plan.rows, steps or {})
        self.launching += self._pricing.launching
        return StageResult(StepResult(plan.step, tuple(sampled), busy=busy), outputs)

    def _hidden(self, tokens: int, width: int) -> Array:
        array = self._arrays.get((tokens, width))
        if array is None:
            array = self._arrays[tokens, width] = _hollow("float16", (tokens, width))
        return array

    def alike(self, a: Array, b: Array) -> Likeness:
        """Nothing was computed: predictions are right as often as is said."""
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
    """Rows [first, last) of arrays of one dtype and width, below each other."""
    like = pieces[0][0]
    return _hollow(like.dtype, (sum(last - first for _, first, last in pieces), like.shape[1]))
