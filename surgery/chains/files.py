"""Files of a chain with its own format: tensors keyed `parts.<i>.<name within the component>`, `blockzoo_chain` config.

One key format for the writers (`surgery.models.put`, `surgery.modules.stack`) and the readers (`surgery.ingest.draft`,
`surgery.chains.hf_model`). Input is untrusted: every statement of the config is checked against the tensors' shapes.
Pure: no torch, no store; a tensor is represented by a digest or a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surgery.chains.plan import (
    ChainLink,
    ChainPlan,
    parse_chain,
    renumbered,
    stitch_component,
    stitch_of,
    stitch_spec,
)
from surgery.families.shapes import Shape, check_component, dims_of
from surgery.families.specs import spec_of
from surgery.families.table import family_of
from surgery.ingest.cut import layer_kinds
from zoo.errors import MalformedCheckpoint
from zoo.manifest import Component, Placed, canonical_json

#: Limit on a config's sizes: modules are built from all sources, including those with sizes that no tensor confirms.
_SIZE_LIMIT = 1 << 20


def part_key(at: int, name: str) -> str:
    """Return the key of a tensor of the component at index `at` of the chain."""
    return f"parts.{at}.{name}"


def place_parts(config: Mapping[str, Any], tensors: Mapping[str, str]) -> tuple[Placed, ...]:
    """Return the components that a chain's config and keys describe, with layers numbered along the chain.

    Args:
        tensors: key -> tensor digest.

    Raises:
        MalformedCheckpoint: A broken config, a key without a place, or a component without tensors or of a kind that
            its family does not have.
        UnknownFamily: A source of an unknown family.
    """
    plan = parse_chain(config)
    named = _by_part(tensors, len(plan.links))
    return renumbered(_component(config, plan, at, named[at]) for at in range(len(plan.links)))


def _by_part(tensors: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return, by component index, name within the component -> value."""
    named: list[dict[str, Any]] = [{} for _ in range(count)]
    places = {str(at): at for at in range(count)}
    for key, value in tensors.items():
        head, at, name = [*key.split(".", 2), "", ""][:3]
        if head != "parts" or at not in places or not name:
            raise MalformedCheckpoint(f"tensor {key[:100]!r} has no place in a chain of {count} components")
        named[places[at]][name] = value
    return named


def _component(config: Mapping[str, Any], plan: ChainPlan, at: int, named: Mapping[str, str]) -> Component:
    link = plan.links[at]
    if link.source is None:
        if set(named) != {"bias", "weight"}:
            raise MalformedCheckpoint(f"component {at} of the chain is a stitch, which has a weight and a bias")
        return stitch_component(stitch_of(at, config["chain"][at]), named["weight"], named["bias"])
    source = plan.sources[link.source]
    family = family_of(source)
    if link.kind not in ("embedding", "lm_head", *layer_kinds(family)):
        raise MalformedCheckpoint(
            f"component {at} of the chain is a {link.kind}, which {family.name} models do not have"
        )
    if not named:
        raise MalformedCheckpoint(f"the files hold nothing of component {at} of the chain, a {link.kind}")
    spec = canonical_json(spec_of(source, family, link.kind, link.layer))
    return Component(link.kind, family.name, spec, tuple(sorted(named.items())))


def check_parts(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
    """Check the chain's config against the shapes of all its tensors, by key. Raises as `place_parts`."""
    plan = parse_chain(config)
    named = _by_part(shapes, len(plan.links))
    placed = place_parts(config, dict.fromkeys(shapes, ""))
    _check_widths(plan, placed)
    for at, (link, each) in enumerate(zip(plan.links, placed, strict=True)):
        where = f"component {at}"
        if link.source is not None:
            check_component(plan.sources[link.source], link.kind, named[at], where)
            continue
        spec = stitch_spec(each.component)
        if (named[at]["weight"], named[at]["bias"]) != ((spec.width_out, spec.width_in + 1), (spec.width_out,)):
            raise MalformedCheckpoint(
                f"{where}, a stitch from {spec.width_in} to {spec.width_out} values a token, has other shapes"
            )


def _check_widths(plan: ChainPlan, placed: Sequence[Placed]) -> None:
    """Check that there is one embedding, one head, and that every component reads the width that it is given."""
    kinds = [link.kind for link in plan.links]
    if kinds[0] != "embedding" or kinds[-1] != "lm_head" or {"embedding", "lm_head"} & set(kinds[1:-1]):
        raise MalformedCheckpoint("the chain in config.json does not lead from one embedding to one head")
    widths = [_width(source) for source in plan.sources]
    given: int | None = None
    for at, (link, each) in enumerate(zip(plan.links, placed, strict=True)):
        reads, gives = _widths(link, each.component, widths)
        if given is not None and reads is not None and given != reads:
            raise MalformedCheckpoint(
                f"component {at} of the chain is for {reads} values a token, it would be given {given}"
            )
        given = gives


def _width(source: Mapping[str, Any]) -> int | None:
    """Return the width of the hidden states, if the config says it."""
    dims = dims_of(source, family_of(source))
    if dims is not None and max(dims.hidden, dims.heads, dims.head) > _SIZE_LIMIT:
        raise MalformedCheckpoint(f"a source of the chain in config.json has sizes beyond {_SIZE_LIMIT:,}")
    return None if dims is None else dims.hidden


def _widths(link: ChainLink, component: Component, widths: Sequence[int | None]) -> tuple[int | None, int | None]:
    if link.source is not None:
        return widths[link.source], widths[link.source]
    spec = stitch_spec(component)
    return spec.width_in, spec.width_out
