"""The plan of a chain, as data: the configs that its components come from, and each component's place in those models.

A checkpoint's chain has one source, its own `config.json`. A chain made here (composed, pruned, stitched) that fits no
architecture of transformers has a `config.json` of model type `blockzoo_chain`, which contains its sources whole:

    {"model_type": "blockzoo_chain", "sources": [{…config.json…}, …],
     "chain": [{"kind": "embedding", "source": 0}, {"kind": "attention", "source": 0, "layer": 3}, …,
               {"kind": "stitch", "in": 256, "out": 384, "position": 7.0}, …, {"kind": "lm_head", "source": 1}],
     "vocab_size": …, "max_position_embeddings": …, …}

Pure: no torch, no store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from surgery.families.table import family_of, layer_count
from zoo.errors import InputError, MalformedCheckpoint, NotServable
from zoo.manifest import Component, ComponentKind, Placed, canonical_json

#: `model_type` of configs that this project writes, and the family of such models in the catalogue.
CHAIN = "blockzoo_chain"
#: The family of stitching blocks.
STITCH = "stitch"

#: Limits of a chain, far above any useful one, so that its config.json stays readable and its models can be built.
_SOURCES_LIMIT = 64
_LINKS_LIMIT = 25_000
_SOURCE_LAYERS_LIMIT = 10_000
_WIDTH_LIMIT = 1 << 32


@dataclass(frozen=True, slots=True)
class ChainLink:
    """Origin of one component's modules: those of `layer` in the model of config number `source`.

    A stitch has no source.
    """

    kind: ComponentKind
    source: int | None
    layer: int | None


@dataclass(frozen=True)
class ChainPlan:
    """The plan of a chain.

    Fields:
        sources: Configs (`config.json` as objects).
        links: One per component, in order.
    """

    sources: tuple[Mapping[str, Any], ...]
    links: tuple[ChainLink, ...]

    @property
    def is_plain(self) -> bool:
        """Whether it is one checkpoint's own chain, with each component at its original place."""
        return len(self.sources) == 1


def is_chain(config: Mapping[str, Any]) -> bool:
    """Return whether a config is of type `blockzoo_chain`."""
    return config.get("model_type") == CHAIN


def plan_of(config: Mapping[str, Any], components: Sequence[Placed]) -> ChainPlan:
    """Return the plan of a stored model's components.

    Raises:
        MalformedCheckpoint: A chain's config is broken, or does not describe these components.
        UnknownFamily: A source of an unknown family.
    """
    if not is_chain(config):
        return ChainPlan((config,), tuple(ChainLink(p.component.kind, 0, p.layer) for p in components))
    plan = parse_chain(config)
    if [link.kind for link in plan.links] != [placed.component.kind for placed in components]:
        raise MalformedCheckpoint("the chain in config.json does not list the model's components")
    return plan


def parse_chain(config: Mapping[str, Any]) -> ChainPlan:
    """Parse a chain's config. Raises MalformedCheckpoint, UnknownFamily."""
    sources, links = config.get("sources"), config.get("chain")
    if (
        not isinstance(sources, list)
        or not 0 < len(sources) <= _SOURCES_LIMIT
        or not all(isinstance(each, dict) for each in sources)
    ):
        raise MalformedCheckpoint("config.json of a chain names no usable list of sources")
    if not isinstance(links, list) or not 0 < len(links) <= _LINKS_LIMIT:
        raise MalformedCheckpoint("config.json of a chain names no usable list of components")
    for each in sources:
        family_of(each)
        if layer_count(each) > _SOURCE_LAYERS_LIMIT:
            raise MalformedCheckpoint(
                f"a source of the chain in config.json has more than {_SOURCE_LAYERS_LIMIT:,} layers"
            )
    return ChainPlan(tuple(sources), tuple(_link(at, link, sources) for at, link in enumerate(links)))


def _link(at: int, link: Any, sources: Sequence[Mapping[str, Any]]) -> ChainLink:
    if not isinstance(link, dict) or link.get("kind") not in get_args(ComponentKind):
        raise MalformedCheckpoint(f"component {at} of the chain in config.json has no known kind")
    kind = cast(ComponentKind, link["kind"])
    if kind == STITCH:
        stitch_of(at, link)
        return ChainLink(kind, None, None)
    source, layer = link.get("source"), link.get("layer")
    if not isinstance(source, int) or isinstance(source, bool) or not 0 <= source < len(sources):
        raise MalformedCheckpoint(f"component {at} of the chain in config.json names no source")
    if kind in ("embedding", "lm_head"):
        return ChainLink(kind, source, None)
    if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < layer_count(sources[source]):
        raise MalformedCheckpoint(f"component {at} of the chain in config.json names no layer of its source")
    return ChainLink(kind, source, layer)


def config_for(plan: ChainPlan, components: Sequence[Placed], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of a chain with a plan of its own.

    Args:
        extra: Vocabulary, context length, special tokens.

    Raises:
        InputError: More than a chain can hold.
        ValueError: The plan does not match the components.
    """
    if len(plan.sources) > _SOURCES_LIMIT or len(plan.links) > _LINKS_LIMIT:
        raise InputError(
            f"a chain that fits no architecture of transformers holds at most {_LINKS_LIMIT:,} components of "
            f"{_SOURCES_LIMIT} configs; "
            f"this one has {len(plan.links):,} of {len(plan.sources)}"
        )
    links = [_link_entry(link, placed.component) for link, placed in zip(plan.links, components, strict=True)]
    layers = {placed.layer for placed in components if placed.layer is not None}
    return {
        "model_type": CHAIN,
        "architectures": ["BlockZooChainForCausalLM"],
        "num_hidden_layers": len(layers),
        "tie_word_embeddings": False,
        **extra,
        "sources": [dict(source) for source in plan.sources],
        "chain": links,
    }


def _link_entry(link: ChainLink, component: Component) -> dict[str, Any]:
    if link.kind == STITCH:
        spec = stitch_spec(component)
        return {"kind": STITCH, "in": spec.width_in, "out": spec.width_out, "position": spec.position}
    entry: dict[str, Any] = {"kind": link.kind, "source": link.source}
    return entry if link.layer is None else {**entry, "layer": link.layer}


@dataclass(frozen=True, slots=True)
class StitchSpec:
    """Settings of a stitch at its place (BL-09): input and output width, and the position given as its extra input."""

    width_in: int
    width_out: int
    position: float


def stitch_of(at: int, entry: Mapping[str, Any]) -> StitchSpec:
    """Return the settings of the stitch at an index of the chain in config.json. Raises MalformedCheckpoint."""
    sizes, position = (entry.get("in"), entry.get("out")), entry.get("position")
    if not all(type(size) is int and 0 < size < _WIDTH_LIMIT for size in sizes):
        raise MalformedCheckpoint(f"component {at} of the chain in config.json is a stitch without widths")
    if not isinstance(position, int | float) or isinstance(position, bool) or not math.isfinite(position):
        raise MalformedCheckpoint(f"component {at} of the chain in config.json is a stitch without a position")
    return StitchSpec(entry["in"], entry["out"], float(position))


def stitch_component(spec: StitchSpec, weight: str, bias: str) -> Component:
    """Return a stitching block. `weight` [width_out, width_in + 1] and `bias` [width_out] are tensor digests.

    The position is a setting, not a weight: one trained stitch is used at every place, and its tensors are stored once.
    """
    described = {"in": spec.width_in, "out": spec.width_out, "position": spec.position}
    return Component("stitch", STITCH, canonical_json(described), (("bias", bias), ("weight", weight)))


def stitch_spec(component: Component) -> StitchSpec:
    """Return the settings of a stitching block. Raises NotServable for any other component."""
    if component.kind != STITCH:
        raise NotServable(f"a component of kind {component.kind} is no stitch")
    spec = json.loads(component.spec)
    return StitchSpec(int(spec["in"]), int(spec["out"]), float(spec["position"]))


def renumbered(components: Iterable[Component]) -> tuple[Placed, ...]:
    """Return components in order, with layers numbered along the chain.

    An ffn or a whole layer ends a layer. An attention without an ffn is a layer too: the next attention begins another.
    """
    placed: list[Placed] = []
    layer = -1
    ended = True
    for component in components:
        if component.kind in ("embedding", "stitch", "lm_head"):
            placed.append(Placed(None, component))
            ended = True
            continue
        if ended or component.kind in ("attention", "layer"):
            layer += 1
        ended = component.kind in ("ffn", "layer")
        placed.append(Placed(layer, component))
    return tuple(placed)
