"""Define chains that run on several devices: blocks, chains, stages, paths, and the interface of stage engines.

    Chain      a model's blocks in order; each block is a run [lo, hi) of the model's components
    Stage      components [lo, hi) of one model on one device: consecutive blocks without a hop between them (BL-15)
    Path       the hops that a sequence passes, one per change of device, in order

Weights are shared below this level: two stages of two models on one device hold their common tensors once
(`engine.models.components`), and their rows run in one batch. This module does not depend on device states, tensors or
transports. An `Array` is opaque to scheduler and agents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from runtime.types import EngineMemory, LengthMasses, ModelSpec, Opened, StepPlan, StepResult

#: Name under which engines load one version of a model: `model#` and the first 16 digits of the version.
_PINNED = re.compile(r"(?P<model>.+)#(?P<version>[0-9a-f]{16})", re.DOTALL)
_STAGE = re.compile(r"(?P<model>.+)\[(?P<lo>[0-9]{1,9}):(?P<hi>[0-9]{1,9})\]", re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class ModelKey:
    """Name a model, and optionally one version of it by its first digits. As text: `model#0123456789abcdef`.

    An empty version is the model's current one.
    """

    model: str
    version: str = ""

    @property
    def text(self) -> str:
        return f"{self.model}#{self.version}" if self.version else self.model

    @classmethod
    def parse(cls, text: str) -> ModelKey:
        """Parse the text form. A name that does not match it is a model without a version."""
        found = _PINNED.fullmatch(text)
        return cls(text) if found is None else cls(found["model"], found["version"])


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """Name components [lo, hi) of a model, where `model` is `Chain.loaded_as`.

    The first stage of a chain begins with the embedding, the last ends with the head.
    """

    model: str
    lo: int
    hi: int

    @property
    def id(self) -> str:
        """Return its name on a device, as used in `ModelSpec.name` and `Row.model`."""
        return f"{self.model}[{self.lo}:{self.hi}]"

    @classmethod
    def parse(cls, text: str) -> Stage:
        """Parse an id. Raises ValueError if it is malformed."""
        found = _STAGE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not the id of a stage, model[first:end]")
        return cls(found["model"], int(found["lo"]), int(found["hi"]))

    @property
    def key(self) -> ModelKey:
        """Return the model and version that the stage belongs to."""
        return ModelKey.parse(self.model)


@dataclass(frozen=True, slots=True)
class Block:
    """Describe a block to the scheduler, which places, scales and moves it.

    Fields:
        id: Digest over the digests of its components, without adapters.
        nbytes: Bytes of weights, each distinct tensor counted once.
        kv_layers: Attention layers in it.
        tables: Bytes of the tensors of an embedding or a head in it, by digest. A tied head has the embedding's table,
            and a device with both blocks holds it once.
        components: Number of components; 0 if unknown.
    """

    id: str
    nbytes: int
    kv_layers: int
    tables: tuple[tuple[str, int], ...] = ()
    components: int = 0


@dataclass(frozen=True, slots=True)
class BlockUse:
    """Describe a block's place in a chain: components [lo, hi).

    Fields:
        domain: KV domain of its pages there (UN-15): the weights, adapters and stitches of it and of everything before
            it, dtype and positions.
        adapter_bytes: Bytes that this model's adapters add to it.
        input_bytes: Bytes of the hidden states that enter it per token; 0 for the first block.
    """

    block: str
    lo: int
    hi: int
    kv_layers: int
    domain: str
    adapter_bytes: int = 0
    input_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Boundary:
    """Describe a place between two components of a chain, where another chain may part from it (UN-15).

    Fields:
        at: Components before it.
        layers: Attention layers before it, at least one.
        domain: KV domain of these layers' pages, and of the hidden states here. Equal domains and equal tokens have
            equal pages and hidden states, bit for bit.
        nbytes: Bytes of the hidden states here per token.
    """

    at: int
    layers: int
    domain: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Relate a low-rank delta to the full fine-tune that it rewrites.

    Fields:
        of: Name of the fine-tune.
        score: Similarity of the answers of the two in [0, 1].
    """

    of: str
    score: float


@dataclass(frozen=True, slots=True)
class Chain:
    """Describe one version of a model as a list of blocks.

    Fields:
        spec: Spec of the whole model; `kv_layers` is the sum over all blocks.
        version: Digest over the components in order, adapters included. A sequence keeps the version that it started
            with (UN-09).
        uses: The blocks in order.
        source: Name under which engines load this version; empty for the model's name. Two versions loaded at the same
            time have different names.
        rewriting: Set if the model is a low-rank delta that may serve requests for the model that it rewrites.
        boundaries: All places up to its last attention layer at which other chains may part from it, in order; empty if
            it shares pages with no other chain.
    """

    spec: ModelSpec
    version: str
    uses: tuple[BlockUse, ...]
    source: str = ""
    rewriting: Rewriting | None = None
    boundaries: tuple[Boundary, ...] = ()

    @property
    def model(self) -> str:
        return self.spec.name

    @property
    def loaded_as(self) -> str:
        """Return the name under which devices load it, used in stages, opened sequences and migrations."""
        return self.source or self.spec.name

    @property
    def length(self) -> int:
        """Return the number of components."""
        return self.uses[-1].hi

    def stage(self, lo: int, hi: int) -> Stage:
        """Return components [lo, hi) as a stage."""
        return Stage(self.loaded_as, lo, hi)

    def blocks(self, lo: int, hi: int) -> frozenset[str]:
        """Return the blocks that lie within components [lo, hi)."""
        return frozenset(use.block for use in self.uses if lo <= use.lo and use.hi <= hi)


@dataclass(frozen=True, slots=True)
class Variant:
    """Describe a chain that may serve requests for another one, if they allow it (BL-20). Some of its blocks differ.

    It has its own KV domains; its `spec` has the name of the chain that it replaces. A low-rank delta keeps its own
    name, because it is a served model itself.

    Fields:
        name: Name reported to clients as `served_by`.
        of: Version of the chain that it replaces.
        score: Similarity of its answers in [0, 1], measured or estimated when the variant was made.
    """

    name: str
    chain: Chain
    of: str
    score: float
    kind: Literal["equivalent", "stitched", "delta"] = "equivalent"


@dataclass(frozen=True, slots=True)
class Hop:
    """Describe consecutive blocks of a chain on one device: components [lo, hi).

    Fields:
        layers: The attention layers [first, last) of the chain in these components.
    """

    device: str
    lo: int
    hi: int
    layers: tuple[int, int] = (0, 0)

    def covers(self, layers: tuple[int, int]) -> bool:
        return self.layers[0] <= layers[0] and layers[1] <= self.layers[1]


#: The hops of a sequence in order; consecutive hops are on different devices.
Path = tuple[Hop, ...]


def path_of(chain: Chain, devices: Sequence[str]) -> Path:
    """Build the path of a chain from the device of each block; neighbouring blocks on one device form one hop (BL-15).

    Raises ValueError if there is not exactly one device per block.
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
    """Return the device of each block of a chain along a path."""
    return tuple(next(hop.device for hop in path if hop.lo <= use.lo and use.hi <= hop.hi) for use in chain.uses)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Describe a model that differs from another one in components [lo, hi) only, where it has cheaper ones (BL-10).

    Fields:
        lo, hi: The components of the original that are replaced.
        count: Number of components that replace them, [lo, lo + count).
        nbytes: Bytes of weights that the original does not have.
    """

    model: str
    lo: int
    hi: int
    count: int
    nbytes: int = 0

    def stage(self, hop: Hop) -> Stage | None:
        """Return the stage that can replace a hop, or None if the hop does not contain all replaced components."""
        if not (hop.lo <= self.lo and self.hi <= hop.hi):
            return None
        return Stage(self.model, hop.lo, hop.hi - (self.hi - self.lo) + self.count)


@dataclass(frozen=True, slots=True)
class RunAhead:
    """Describe the hop of a sequence's path that is predicted (BL-25): `stage` runs ahead of the hop's own stage.

    Fields:
        hop: Index of the hop in the path.
        threshold: Least cosine, over all tokens, between predicted and real output for a prediction to be accepted;
            None: only bit-identical output is accepted.
    """

    hop: int
    stage: Stage
    threshold: float | None


class Array(msgspec.Struct, frozen=True, gc=False):
    """Hold an array on its way between devices.

    `data` is bytes-like in the machine's byte order; only engines and transports read it. On a direct link it is a flat
    uint8 tensor on its device, for which `len` and slicing mean the same.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Any


class Stacked(Mapping[str, Array]):
    """Map row names to hidden states that are stored back to back in one array [tokens, width].

    A row's array is sliced from it only on access.
    """

    __slots__ = ("_at", "counts", "names", "whole")

    def __init__(self, names: Sequence[str], whole: Array, counts: Sequence[int] | None = None) -> None:
        """Store `counts[i]` tokens per row (None: one each).

        Raises ValueError if their sum is not the number of tokens in `whole`.
        """
        self.names, self.whole = tuple(names), whole
        self.counts = None if counts is None or all(count == 1 for count in counts) else tuple(counts)
        if whole.shape[0] != (len(self.names) if self.counts is None else sum(self.counts)):
            raise ValueError(f"{whole.shape[0]} tokens are not those of {len(self.names)} rows")
        self._at: dict[str, tuple[int, int]] | None = None

    def matches_rows(self, names: Sequence[str], counts: Sequence[int] | None = None) -> bool:
        """Return whether it holds exactly these rows in this order, with these token counts (None: one each)."""
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
    """Reference tokens [lo, hi) of an array [tokens, width] that several rows share."""

    whole: Array
    lo: int
    hi: int


def own(part: Array | Slice) -> Array:
    """Return a row's own array, sliced from the shared one if necessary."""
    return cut(part.whole, part.lo, part.hi) if isinstance(part, Slice) else part


def stacked(names: Sequence[str], parts: Sequence[Array | Slice]) -> Mapping[str, Array]:
    """Return rows' hidden states by name, as one array if they lie back to back in one."""
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
    """Return tokens [lo, hi) of an array [tokens, width] as a view."""
    if (lo, hi) == (0, array.shape[0]):
        return array
    size = len(array.data) // array.shape[0]
    return Array(array.dtype, (hi - lo, *array.shape[1:]), array.data[lo * size : hi * size])


@dataclass(frozen=True, slots=True)
class Likeness:
    """Compare two arrays: whether they are bit-identical, and the least cosine over their tokens."""

    same: bool
    cosine: float


@dataclass(frozen=True, slots=True)
class StageResult:
    """Hold the result of a step of a stage engine.

    Fields:
        result: The result as of any engine.
        outputs: Hidden states [tokens, width] by row name, from stages without a head.
        saved: Hidden states [tokens, width] that rows asked for (`Row.saves`), in host memory, by row name and number
            of the component that they enter.
        lengths: What the model's probe forecasts of answers, by row name (`Row.probed`).
    """

    result: StepResult
    outputs: Mapping[str, Array]
    saved: Mapping[str, Mapping[int, Array]] = field(default_factory=dict)
    lengths: Mapping[str, LengthMasses] = field(default_factory=dict)


class LaunchedStep(Protocol):
    """Represent a step that an engine has launched."""

    def result(self) -> StageResult:
        """Wait for the step and return its result. Call it once per step, in launch order.

        Raises as `StageEngine.run`.
        """
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Implement `LaunchedStep` for a step that is already finished."""

    told: StageResult

    def result(self) -> StageResult:
        return self.told


@runtime_checkable
class IdleWork(Protocol):
    """An engine that can do work for later steps while it has none to run."""

    def prepare_next(self) -> bool:
        """Do one part of the work, within a second; return whether there is more to do."""
        ...


@runtime_checkable
class Launching(Protocol):
    """Define an engine that can split `run` into launching a step and waiting for its result.

    If `ahead` is true, a second step may be launched before the first one's result is read, and its rows may await
    tokens that the first one samples (`Row.awaits`). If a step fails, the step launched behind it has failed too,
    whatever it returns.
    """

    @property
    def ahead(self) -> bool: ...

    def launch(self, plan: StepPlan, inputs: Mapping[str, Array]) -> LaunchedStep:
        """Start a step. Errors of `StageEngine.run` are raised here or by the step's `result`."""
        ...


@runtime_checkable
class HostMemory(Protocol):
    """Define an engine with host memory, in which weights wait and K and V of sequences that gave way are kept.

    Engines without it copy by `read_pages` and `write_pages`; these may leave bytes on the device, or need pages.
    """

    @property
    def host_weights(self) -> int:
        """Return the bytes of weights that wait there."""
        ...

    def share_host_memory(self, kv: int) -> None:
        """Free weights that wait, until K and V may take `kv` bytes of the host memory."""
        ...

    def copy_out(self, key: str, tokens: int, pages: Sequence[int]) -> Array:
        """Return the K and V of a page table's first `tokens` tokens, in these pages, in host memory.

        The shape is that of `StageEngine.read_pages`. Raises ValueError if they are not there.
        """
        ...

    def copy_in(self, opened: Opened, tokens: int, pages: Sequence[int], data: Array) -> None:
        """Write what `copy_out` returned into the pages of a sequence that is open, or is opened by this.

        Raises ValueError for data of another shape.
        """
        ...


@runtime_checkable
class Preparing(Protocol):
    """Define an engine that can read and prepare the weights of a stage on another thread, while steps run."""

    @property
    def prepares(self) -> bool:
        """Whether stages are to be prepared before they are loaded."""
        ...

    def prepare(self, stage: Stage) -> None:
        """Prepare a stage, so that `StageEngine.load` takes little time. Raises as that; called on any thread."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedUnits:
    """Describe what a load brought to a device (UN-04).

    Fields:
        units: Digest of the weights of each component of the stage, in order.
        disk: Bytes that were read from disk.
        host: Bytes that host memory still had.
    """

    units: tuple[str, ...]
    disk: int = 0
    host: int = 0


@runtime_checkable
class Tiered(Protocol):
    """Define an engine that keeps weights which no stage uses in host memory, and reports which ones."""

    def loaded_units(self, stage: Stage) -> LoadedUnits:
        """Return what the load of a stage brought. Call it once per load, right after it."""
        ...

    def expect(self, stage: Stage) -> None:
        """Keep what host memory has of a stage until it is loaded, or another one is expected.

        Raises what loading it would raise; it is harmless to load it then.
        """
        ...

    def host_changes(self) -> Mapping[str, int]:
        """Return the bytes that host memory now has of each unit, by digest, of those that changed since the last call.

        0: the unit is in use on the device, or gone.
        """
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """Define an engine that reads the weights of stages into host memory before they are needed (QL-13)."""

    def read_ahead(self, stages: Sequence[Stage], stop: Callable[[], bool]) -> Iterator[tuple[Stage, tuple[str, ...]]]:
        """Read what neither the device nor host memory has of these stages, in this order, as far as there is room.

        Yields each stage that is there in full, with the digest of the weights of each of its components. Ends early
        once `stop` returns True. What the last call named leaves host memory last. Raises what loading a stage would
        raise; called on any thread.
        """
        ...


#: Called while a step runs, between layers, with a function that returns how many attention layers of its stage each
#: row has passed. Pages of these layers have their K and V, and may be read.
LayerWatch = Callable[[Callable[[], Mapping[str, int]]], None]


@runtime_checkable
class WatchesLayers(Protocol):
    """Define an engine that shows how far a step is (TI-15)."""

    def watch_layers(self, watch: LayerWatch) -> bool:
        """Call `watch` between the layers of steps with prompts from now on; return False if the engine cannot.

        Calls come from the thread that runs the step.
        """
        ...


class StepRunner(Protocol):
    """Define an object that runs steps, with the signature of `StageEngine.run`."""

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult: ...


#: Feature that an engine lacks. `parts`: it runs whole chains only. `pages`: it keeps K and V by sequence instead of in
#: pages, so shared prefixes are copied, and sequences cannot migrate. `entry`: rows cannot enter inside a stage.
#: `loans`: it attends to no K and V on another device, and for none.
Lack = Literal["parts", "pages", "entry", "loans"]


class StageEngine(Protocol):
    """Define the interface of an engine that runs stages on one device. Plans are those of `runtime.types`, for stages.

    - `Row.model` is a stage's id. A sequence has a separate name in each stage, ending in `@<lo>`, so that a path that
      returns to a device has one page table per stage there.
    - Rows of a stage that does not begin with the embedding carry zeros as tokens; their hidden states [tokens, width]
      are in `inputs` under the row's name. `sample` is true only in stages with a head. The same holds for rows that
      enter inside their stage (`Row.enters`); the layers before are not run, and their pages only read. Of rows that
      leave inside it (`Row.layers`) the layers behind are not run, and their pages are neither read nor written.
    - A stage without attention takes no pages. Pages have the same bytes on all devices, and all stages of a model put
      the same number of tokens into a page. Positions before a table's first row are already in its pages: they are
      shared, or were written by `write_pages`.
    - An engine may defer rows when its batch has no room, and, where the plan says so (`StepPlan.defers`), when their
      grammars are not ready (`StepResult.deferred`). `lacks` lists what it cannot do.

    All calls come from one thread, except with a second lane.
    """

    @property
    def device(self) -> str: ...

    @property
    def lacks(self) -> frozenset[Lack]: ...

    @property
    def page_capacity(self) -> int: ...

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page, K and V together."""
        ...

    def load(self, stage: Stage) -> ModelSpec:
        """Load a stage and return its spec: as the model's, but with the stage's id as name and its own `kv_layers`.

        `kv_layers` may be 0. Raises zoo.errors.NotFound, NotServable, DamagedObject.
        """
        ...

    def unload(self, stage: Stage) -> None: ...

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        """Run one step.

        Raises EngineLost when no later step can succeed; any other exception fails only this step's rows.
        """
        ...

    def second_lane(self) -> StepRunner | None:
        """Return a second runner of steps on the same stages and pages (BL-25), or None if not supported.

        Call it once, before any step. From then on its steps and those of `run` may overlap, each on a thread of its
        own. A sequence uses only one of the two, and neither writes pages of the other; both receive all released
        sequences. Other methods may be called from a third thread and wait for steps.
        """
        ...

    def return_pages(self, pages: Sequence[int]) -> None:
        """Give the memory of these free pages back to the system; they are zero when they are used again.

        Does nothing where that is impossible.
        """
        ...

    def read_pages(self, pages: Sequence[int]) -> Array:
        """Return a copy of the pages' bytes: uint8 [pages, page_bytes], K before V."""
        ...

    def write_pages(self, pages: Sequence[int], data: Array) -> None:
        """Write bytes as returned by `read_pages`. Raises ValueError for data of another shape."""
        ...

    def alike(self, a: Array, b: Array) -> Likeness:
        """Compare a prediction with the real hidden states; both [tokens, width] of one dtype (BL-25)."""
        ...

    def memory(self) -> EngineMemory: ...


def looks_ahead(engine: object) -> bool:
    """Return whether a step may be launched before the previous one is finished."""
    return isinstance(engine, Launching) and engine.ahead
