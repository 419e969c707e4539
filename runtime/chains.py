"""The vocabulary of chains that run on several devices: blocks, chains, stages, paths, and the engine that runs
parts of chains.

    Chain      a model's blocks in order; each is a run [lo, hi) of its components
    Stage      components [lo, hi) of one model on one device: blocks that run back to back, without a hop between
               (BL-15)
    Path       who runs a sequence: one Hop per change of device, in order

Weights are shared below this: two stages of two models on one device hold what they have in common once
(`engine.models.components`), and their rows run together. Knows nothing of devices' states, of tensors or of
transports; an `Array` is opaque to whoever decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from runtime.types import EngineMemory, ModelSpec, StepPlan, StepResult

#: Between a model's name and the first digits of a version of it, in names that engines load by; and how many digits.
_PINNED = re.compile(r"(?P<model>.+)#(?P<version>[0-9a-f]{16})", re.DOTALL)
_STAGE = re.compile(r"(?P<model>.+)\[(?P<lo>[0-9]{1,9}):(?P<hi>[0-9]{1,9})\]", re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class ModelKey:
    """A model, and the first digits of one version of it; none for the model as it stands. As text:
    `model#0123456789abcdef`.
    """

    model: str
    version: str = ""

    @property
    def text(self) -> str:
        return f"{self.model}#{self.version}" if self.version else self.model

    @classmethod
    def parse(cls, text: str) -> ModelKey:
        """From the text of one; any other name is that of a model without a version."""
        found = _PINNED.fullmatch(text)
        return cls(text) if found is None else cls(found["model"], found["version"])


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """Components [lo, hi) of a model, as `Chain.loaded_as` names it. The first of a chain starts at the embedding, the
    last ends behind the head."""

    model: str
    lo: int
    hi: int

    @property
    def id(self) -> str:
        """Its name on a device, as `ModelSpec.name` and `Row.model` carry it."""
        return f"{self.model}[{self.lo}:{self.hi}]"

    @classmethod
    def parse(cls, text: str) -> Stage:
        """From its id. Raises ValueError for what is none."""
        found = _STAGE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not the id of a stage, model[first:end]")
        return cls(found["model"], int(found["lo"]), int(found["hi"]))

    @property
    def key(self) -> ModelKey:
        """The model and the version that it is of."""
        return ModelKey.parse(self.model)


@dataclass(frozen=True, slots=True)
class Block:
    """A block as the scheduler sees it: what is placed, scaled and moved. `id`: over the digests of its components
    without adapters.

    `nbytes`: its weights, each distinct tensor once. `kv_layers`: attention layers in it.
    """

    id: str
    nbytes: int
    kv_layers: int


@dataclass(frozen=True, slots=True)
class BlockUse:
    """A block in a chain: components [lo, hi). `domain`: the KV domain of its pages there (UN-15): weights, adapters
    and stitches of it and of all upstream, dtype, positions. `adapter_bytes`: what this model's adapters add to it.
    `input_bytes`: of the hidden states that a token comes into it with; 0 where it begins the chain.
    """

    block: str
    lo: int
    hi: int
    kv_layers: int
    domain: str
    adapter_bytes: int = 0
    input_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Name the full fine-tune `of` which a model is a low-rank delta, and how alike the answers of the two are, in
    [0, 1]."""

    of: str
    score: float


@dataclass(frozen=True, slots=True)
class Chain:
    """One version of a model, as blocks. `spec`: what holds for all of it; its `kv_layers` are those of all blocks
    together.

    `version` names the components in order, adapters included: a sequence keeps to the one it began with (UN-09).
    `source`: under which name engines find this very version, the model's own if it is empty; two versions of a model
    that are there at once have two. `rewriting`: set where the model may answer for the one that it rewrites.
    """

    spec: ModelSpec
    version: str
    uses: tuple[BlockUse, ...]
    source: str = ""
    rewriting: Rewriting | None = None

    @property
    def model(self) -> str:
        return self.spec.name

    @property
    def loaded_as(self) -> str:
        """What devices know it by: in stages, in what they open, and in what they move."""
        return self.source or self.spec.name

    @property
    def length(self) -> int:
        """Components in all."""
        return self.uses[-1].hi

    def stage(self, lo: int, hi: int) -> Stage:
        """Components [lo, hi) of it, as a device loads them."""
        return Stage(self.loaded_as, lo, hi)

    def blocks(self, lo: int, hi: int) -> frozenset[str]:
        """Those that lie in components [lo, hi) of it."""
        return frozenset(use.block for use in self.uses if lo <= use.lo and use.hi <= hi)


@dataclass(frozen=True, slots=True)
class Variant:
    """A chain that may stand in for another one, where a request allows it (BL-20): some of its blocks are others,
    equivalent or stitched, or it is a low-rank delta of it.

    It has KV domains of its own. Its `spec` is named as that of the chain that it stands for; a delta is a model that
    is served itself, and keeps its name. `name`: what answers say in `served_by`.
    `of`: the version that it stands for. `score`: how alike its answers are, in [0, 1], measured or estimated by
    whoever made it.
    """

    name: str
    chain: Chain
    of: str
    score: float
    kind: Literal["equivalent", "stitched", "delta"] = "equivalent"


@dataclass(frozen=True, slots=True)
class Hop:
    """Blocks of a chain back to back on one device: components [lo, hi), which have attention layers [first, last) of
    the chain's.
    """

    device: str
    lo: int
    hi: int
    layers: tuple[int, int] = (0, 0)

    def covers(self, layers: tuple[int, int]) -> bool:
        return self.layers[0] <= layers[0] and layers[1] <= self.layers[1]


#: Who runs a sequence, first hop first; neighbours are on different devices.
Path = tuple[Hop, ...]


def path_of(chain: Chain, devices: Sequence[str]) -> Path:
    """Blocks' devices, one for each use, as hops: neighbours on one device are one (BL-15). Raises ValueError for too
    few or too many.
    """
    if len(devices) != len(chain.uses):
        raise ValueError(f"{chain.model} has {len(chain.uses)} blocks, not {len(devices)}")
    hops: list[Hop] = []
    layer = 0
    for device, use in zip(devices, chain.uses, strict=True):
        after = layer + use.kv_layers
        if hops and hops[-1].device == device:
            hops[-1] = Hop(device, hops[-1].lo, use.hi, (hops[-1].layers[0], after))
        else:
            hops.append(Hop(device, use.lo, use.hi, (layer, after)))
        layer = after
    return tuple(hops)


def devices_of(chain: Chain, path: Path) -> tuple[str, ...]:
    """The device of each block of a chain along a path."""
    return tuple(next(hop.device for hop in path if hop.lo <= use.lo and use.hi <= hop.hi) for use in chain.uses)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A model that is another one but for components [lo, hi) of it, in whose place it has cheaper ones, [lo, lo +
    count) (BL-10).

    `nbytes`: of weights that the other one does not have.
    """

    model: str
    lo: int
    hi: int
    count: int
    nbytes: int = 0

    def stage(self, hop: Hop) -> Stage | None:
        """A hop with the cheaper components in it; None if it does not have all that they stand for."""
        if not (hop.lo <= self.lo and self.hi <= hop.hi):
            return None
        return Stage(self.model, hop.lo, hop.hi - (self.hi - self.lo) + self.count)


@dataclass(frozen=True, slots=True)
class RunAhead:
    """One hop of a sequence's path is predicted (BL-25): `stage` runs before the hop's own.

    `threshold`: the cosine with the hop's own output, of every token, at which a prediction stands; None: only if all
    bits are the same.
    """

    hop: int
    stage: Stage
    threshold: float | None


class Array(msgspec.Struct, frozen=True, gc=False):
    """Numbers on their way between devices. `data` is bytes-like, in the machine's order; only engines and transports
    look into it.

    Where arrays go directly from device to device it is a flat tensor of uint8 on its device, of which `len` and slices
    mean the same.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Any


class Stacked(Mapping[str, Array]):
    """Hidden states of several rows in one array [tokens, width], back to back, by row's name: cut only for who asks
    for one of them.

    `counts`: tokens of each row; None: one each.
    """

    __slots__ = ("_at", "counts", "names", "whole")

    def __init__(self, names: Sequence[str], whole: Array, counts: Sequence[int] | None = None) -> None:
        """Raises ValueError if the array has more or fewer tokens."""
        self.names, self.whole = tuple(names), whole
        self.counts = None if counts is None or all(count == 1 for count in counts) else tuple(counts)
        if whole.shape[0] != (len(self.names) if self.counts is None else sum(self.counts)):
            raise ValueError(f"{whole.shape[0]} tokens are not those of {len(self.names)} rows")
        self._at: dict[str, tuple[int, int]] | None = None

    def matches_rows(self, names: Sequence[str], counts: Sequence[int] | None = None) -> bool:
        """Whether it is of just these rows, in this order, with so many tokens each (None: one)."""
        if self.names != tuple(names):
            return False
        return self.counts is None if counts is None else tuple(counts) == (self.counts or (1,) * len(self.names))

    def __getitem__(self, name: str) -> Array:
        lo, hi = self._places()[name]
        return cut(self.whole, lo, hi)

    def __contains__(self, name: object) -> bool:
        return name in self._places()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def _places(self) -> dict[str, tuple[int, int]]:
        if self._at is None:
            counts = self.counts or (1,) * len(self.names)
            ends = tuple(accumulate(counts))
            self._at = {name: (end - count, end) for name, count, end in zip(self.names, counts, ends, strict=True)}
        return self._at


class Slice(msgspec.Struct, frozen=True, gc=False):
    """Tokens [lo, hi) of an array [tokens, width] that several rows share."""

    whole: Array
    lo: int
    hi: int


def own(part: Array | Slice) -> Array:
    """A row's own array."""
    return cut(part.whole, part.lo, part.hi) if isinstance(part, Slice) else part


def stacked(names: Sequence[str], parts: Sequence[Array | Slice]) -> Mapping[str, Array]:
    """Rows' hidden states by name: in one piece where they lie back to back in one array."""
    first = parts[0] if parts else None
    if isinstance(first, Slice):
        at, whole = first.lo, first.whole
        for part in parts:
            if not isinstance(part, Slice) or part.whole is not whole or part.lo != at:
                break
            at = part.hi
        else:
            counts = [part.hi - part.lo for part in parts]  # type: ignore[union-attr]
            return Stacked(names, whole if at - first.lo == whole.shape[0] else cut(whole, first.lo, at), counts)
    return {name: own(part) for name, part in zip(names, parts, strict=True)}


def cut(array: Array, lo: int, hi: int) -> Array:
    """Tokens [lo, hi) of an array [tokens, width]: a view."""
    size = len(array.data) // array.shape[0]
    return Array(array.dtype, (hi - lo, *array.shape[1:]), array.data[lo * size : hi * size])


@dataclass(frozen=True, slots=True)
class Likeness:
    """Whether two arrays are the same bit by bit, and their least cosine over tokens."""

    same: bool
    cosine: float


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage engine gives back: `result` as of any engine, and by row's name the hidden states [tokens, width] of
    headless stages.
    """

    result: StepResult
    outputs: Mapping[str, Array]


class LaunchedStep(Protocol):
    """A step that an engine has been given."""

    def result(self) -> StageResult:
        """What came of it; waits for that. Asked once, in the order of launches. Raises as `StageEngine.run`."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """`LaunchedStep`, and over by then."""

    told: StageResult

    def result(self) -> StageResult:
        return self.told


@runtime_checkable
class Launching(Protocol):
    """An engine whose `run` comes in two halves. Where it looks `ahead`, a second step may be launched before the
    result of the first is asked for, and its rows may await what that one samples (`Row.awaits`). If one fails, so
    has the one behind it, whatever its result."""

    @property
    def ahead(self) -> bool: ...

    def launch(self, plan: StepPlan, inputs: Mapping[str, Array]) -> LaunchedStep:
        """Begin a step. Raises as `StageEngine.run`, unless its result does."""
        ...


class StepRunner(Protocol):
    """What runs steps; `StageEngine.run`."""

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult: ...


#: What engines may be without: `parts` of chains (they run whole ones only); `pages` (they keep K and V by sequence:
#: what a sequence shares with another is copied, and none moves to another device).
Lack = Literal["parts", "pages"]


class StageEngine(Protocol):
    """One device that runs parts of chains. Plans are those of `runtime.types`, with stages in the place of models:

    `Row.model` is a stage's id, and a sequence has a name that ends with `@<lo>` in each of its stages, so that one
    that comes back to a device has a table there for each. Rows of a stage that does not begin with the embedding
    carry zeros for tokens; what they start from, [tokens, width], is in `inputs` under the row's name. `sample` is
    false but in stages with a head. A stage without attention takes no pages. Pages of all devices have the same
    bytes, and all stages of a model put as many tokens into a page. What lies before the start of a table's first
    row is in its pages already: they were shared, or brought by `write_pages`. An engine may put rows off, when its
    batch has no room for them (`StepResult.deferred`). What it cannot do at all is in `lacks`. Calls come from one
    thread, but where there is a lane beside.
    """

    @property
    def device(self) -> str: ...

    @property
    def lacks(self) -> frozenset[Lack]: ...

    @property
    def page_capacity(self) -> int: ...

    @property
    def page_bytes(self) -> int:
        """Of K and V together."""
        ...

    def load(self, stage: Stage) -> ModelSpec:
        """Make a stage ready. Its spec: the stage's id for a name, its own `kv_layers` (perhaps 0), and else what holds
        for the model.

        Raises zoo.errors.NotFound, NotServable, DamagedObject.
        """
        ...

    def unload(self, stage: Stage) -> None: ...

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        """Run one step. Raises EngineLost when no later step can succeed; any other exception fails this step's rows
        only.
        """
        ...

    def second_lane(self) -> StepRunner | None:
        """A lane of its own for steps, on the same stages and pages (BL-25); None where there is none. To be called
        once, before any step.

        From then on its steps and `run`'s may overlap, each on a thread of its own: a sequence keeps to one of the two,
        and no page that one writes is the other's. Either is told what is released. All else may be called from a third
        thread, and waits for steps.
        """
        ...

    def read_pages(self, pages: Sequence[int]) -> Array:
        """The bytes of pages: uint8 [pages, page_bytes], K before V; a copy."""
        ...

    def write_pages(self, pages: Sequence[int], data: Array) -> None:
        """Put them there. Raises ValueError for data of another shape."""
        ...

    def alike(self, a: Array, b: Array) -> Likeness:
        """Compare hidden states of one dtype and shape, [tokens, width]: a prediction with what it was to be
        (BL-25).
        """
        ...

    def memory(self) -> EngineMemory: ...


def looks_ahead(engine: object) -> bool:
    """Whether steps are to be launched before those before them are over."""
    return isinstance(engine, Launching) and engine.ahead
