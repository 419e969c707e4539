"""Describe a family of models for the scheduler: chains of blocks, which blocks are shared, and each block's shape.

Three ways to provision the same applications (BlockLLM, section 7.1):

- `blocks`: foundations are cut into parts. PE models run the foundation's parts, with their own adapters beside them;
  FF models have their own parts, each equivalent to the foundation's at its place.
- `pm`, per-model provisioning: every model is one private block, with adapters merged into it if their kind allows.
- `ps`, parameter sharing: a foundation and its PE models share one whole block, each with a branch of its own; FF
  models are private.

The shares of weights that PE models have in common with their foundation are the paper's (Table 1, BL-12). PE:
parameter-efficient; FF: full fine-tunes. Pure data, without devices or times.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

from runtime.chains import Block, BlockUse, Chain, Stage
from runtime.sim.models.shapes import ModelShape, shape_named
from runtime.types import ModelSpec
from zoo.errors import InputError, NotFound

Provision = Literal["blocks", "pm", "ps"]
Kind = Literal["foundation", "full", "lora", "adapter", "prefix", "prompt", "bitfit"]

#: Share of an application's weights that is its foundation's (Table 1). The table has no BitFit: a bias for each output
#: of LLaMA-7B's linear layers is 0.02 % of it. A kind without a figure for a foundation takes the other foundation's.
SHARED: Mapping[str, float] = {"lora": 0.9994, "adapter": 0.9262, "prefix": 0.9988, "prompt": 0.9998, "bitfit": 0.9998}

#: Kinds that can be merged into the weights when a model is served alone: sums and biases. A bottleneck has an
#: activation in between, and virtual tokens are no weights.
MERGED: Collection[Kind] = ("lora", "bitfit")
#: Kinds that consist of K and V of virtual tokens.
VIRTUAL: Collection[Kind] = ("prefix", "prompt")

#: Similarity of a full fine-tune's layers to its foundation's: LLaMA-7B and Vicuna-7B (BlockLLM, section 2.2).
_FULL_SIMILARITY = 0.998


@dataclass(frozen=True, slots=True)
class App:
    """One application: a foundation as it is, or a fine-tune of it."""

    name: str
    foundation: str
    kind: Kind

    def __post_init__(self) -> None:
        shape_named(self.foundation)
        if self.kind not in get_args(Kind):
            raise InputError(f"{self.name}: a fine-tune is one of {', '.join(get_args(Kind))}, not {self.kind!r}")


@dataclass(frozen=True, slots=True)
class Cutting:
    """How models become blocks, and K and V become pages.

    Fields:
        parts: Blocks that each foundation is cut into.
        page_tokens: Tokens per page of the model with the largest K and V per token; other models fit more into a page.
        page_layers: Layers that one page stands for. 1 as in a real cluster; more makes page tables smaller and changes
            no times.
        max_model_len: Tokens of prompt and answer together.
        equivalents: Whether requests allow equivalent blocks (BL-28).
    """

    provision: Provision = "blocks"
    parts: int = 4
    page_tokens: int = 16
    page_layers: int = 1
    max_model_len: int = 1024
    equivalents: bool = False

    def __post_init__(self) -> None:
        if self.provision not in get_args(Provision):
            raise InputError(f"provision is one of {', '.join(get_args(Provision))}, not {self.provision!r}")
        if min(self.parts, self.page_tokens, self.page_layers, self.max_model_len) < 1:
            raise InputError("parts, page_tokens, page_layers and max_model_len are positive")


@dataclass(frozen=True, slots=True)
class FamilyPart:
    """A block of the family: components [lo, hi) of a foundation's shape.

    `speed`: factor by which it is faster than that shape (a stand-in).
    """

    block: Block
    shape: ModelShape
    lo: int
    hi: int
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedFamily:
    """Chains by model and parts by block.

    Fields:
        page_bytes: Bytes of a page, on every device.
        equivalents: By block, equivalent blocks with scores (BL-06: pairs, not transitive).
        branching: Adapters run model by model, not joined by kind (the paper's baseline).
    """

    chains: Mapping[str, Chain]
    parts: Mapping[str, FamilyPart]
    page_bytes: int
    equivalents: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    branching: bool = False

    def blocks(self) -> tuple[Block, ...]:
        return tuple(part.block for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all weights: each block once, and each model's own adapters."""
        own = sum(use.adapter_bytes for chain in self.chains.values() for use in chain.uses)
        return own + sum(block.nbytes for block in self.blocks())

    def shape(self, model: str) -> ModelShape:
        return self.parts[self.chain(model).uses[0].block].shape

    def chain(self, model: str) -> Chain:
        """Return the chain of a model. Raises NotFound."""
        if model not in self.chains:
            raise NotFound(f"no model is called {model!r}")
        return self.chains[model]

    def uses(self, stage: Stage) -> tuple[BlockUse, ...]:
        """Return the blocks of a stage.

        Raises NotFound for an unknown model, or components that are no run of its blocks.
        """
        chain = self.chain(stage.model)
        inside = tuple(use for use in chain.uses if stage.lo <= use.lo and use.hi <= stage.hi)
        if not inside or (inside[0].lo, inside[-1].hi) != (stage.lo, stage.hi):
            raise NotFound(f"{stage.id} is no run of blocks")
        return inside


def family_of(apps: Sequence[App], cutting: Cutting) -> SimulatedFamily:
    """Build the family of these applications. Raises InputError without any, or for names given twice."""
    if not apps or len({app.name for app in apps}) != len(apps):
        raise InputError("a family has at least one application, each with a name of its own")
    widest = max(shape_named(app.foundation).kv_bytes for app in apps)
    page_bytes = widest * cutting.page_tokens * cutting.page_layers
    chains, parts = {}, {}
    for app in apps:
        made = _parts_of(app, cutting)
        parts.update({part.block.id: part for part in made})
        chains[app.name] = _chain_of(app, made, cutting, page_bytes)
    return SimulatedFamily(chains, parts, page_bytes, _equivalents(apps, parts, cutting), cutting.provision == "ps")


def _parts_of(app: App, cutting: Cutting) -> list[FamilyPart]:
    shape = shape_named(app.foundation)
    owner = app.name if _private(app, cutting) else app.foundation
    bounds = _bounds(shape, cutting.parts if cutting.provision == "blocks" else 1)
    found = []
    for lo, hi in pairwise(bounds):
        layers = -(-shape.attentions(lo, hi) // cutting.page_layers)
        block = Block(Stage(owner, lo, hi).id, shape.bytes_of(lo, hi), layers, components=hi - lo)
        found.append(FamilyPart(block, shape, lo, hi))
    return found


def _private(app: App, cutting: Cutting) -> bool:
    """Return whether an application shares no weights with other models."""
    return cutting.provision == "pm" or app.kind == "full"


def _bounds(shape: ModelShape, parts: int) -> list[int]:
    """Return the bounds of the parts: between layers, as even as possible; embedding in the first, head in the last."""
    parts = min(parts, shape.layers)
    return [0, *(1 + 2 * (shape.layers * part // parts) for part in range(1, parts)), shape.components]


def _chain_of(app: App, parts: Sequence[FamilyPart], cutting: Cutting, page_bytes: int) -> Chain:
    shape = parts[0].shape
    merged = app.kind in ("foundation", "full") or (_private(app, cutting) and app.kind in MERGED)
    own = 0.0 if merged else 1 - SHARED[app.kind]
    domain = app.foundation if own == 0.0 and not _private(app, cutting) else app.name
    uses = tuple(
        BlockUse(
            part.block.id,
            part.lo,
            part.hi,
            part.block.kv_layers,
            f"{domain}[:{part.hi}]",
            round(own * part.block.nbytes),
            shape.hidden * 2 if part.lo else 0,
        )
        for part in parts
    )
    spec = ModelSpec(
        name=app.name,
        kv_layers=sum(use.kv_layers for use in uses),
        page_tokens=page_bytes // (shape.kv_bytes * cutting.page_layers),
        max_model_len=cutting.max_model_len,
        vocab_size=shape.vocab,
        blocks=tuple(use.block for use in uses),
        domain=domain,
        kind=app.kind,
        base=None if app.kind == "foundation" else app.foundation,
    )
    return Chain(spec, f"{app.name}-1", uses)


def _equivalents(
    apps: Sequence[App], parts: Mapping[str, FamilyPart], cutting: Cutting
) -> Mapping[str, tuple[tuple[str, float], ...]]:
    """Pair each part of a full fine-tune with the foundation's at its place, in both directions, if both exist."""
    found: dict[str, tuple[tuple[str, float], ...]] = {}
    for app in apps:
        if app.kind != "full" or cutting.provision != "blocks":
            continue
        for part in _parts_of(app, cutting):
            twin = Stage(app.foundation, part.lo, part.hi).id
            if twin in parts:
                found[part.block.id] = (*found.get(part.block.id, ()), (twin, _FULL_SIMILARITY))
                found[twin] = (*found.get(twin, ()), (part.block.id, _FULL_SIMILARITY))
    return found
