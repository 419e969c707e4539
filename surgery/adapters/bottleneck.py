"""Place bottleneck adapters of the `adapters` library on their base's components (BL-03): Houlsby, Pfeiffer, parallel.

    [model.]layers.0.attention_adapters.adapters.<name>.adapter_down.0.weight    after the attention (mh_adapter)
    [model.]layers.0.output_adapters.adapters.<name>.adapter_up.bias             after the ffn (output_adapter)
    lm_head.weight                                                               the head, if it is saved with them

Follows adapters 1.3 (`Adapter`, `ParallelAdapter`, `BottleneckLayer`) for families that the library extends itself and
that apply norms before their sub-layers. `BottleneckSettings` holds what the library's switches amount to. Works on
names and shapes only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from surgery.adapters.bottleneck_config import BottleneckConfig
from surgery.adapters.overlay import AdapterBase, OfferedTensor, Overlay, Shape
from zoo.errors import MalformedCheckpoint, UnsupportedAdapter, WrongBase
from zoo.manifest import Placed

#: Families that the library itself extends and that apply norms before their sub-layers; its adapters are not well
#: defined for any other family.
FAMILIES_SUPPORTED = ("gpt2", "llama", "mistral")

_KEY = re.compile(
    r"(?P<layers>(.+\.)?)(?P<layer>\d{1,6})\.(?P<where>attention|output)_adapters"
    r"\.adapters\.(?P<name>[^.]+)\.(?P<part>.+)"
)
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _AdapterSite:
    """A position for an adapter: the kind of its component and its layer."""

    kind: Literal["attention", "ffn"]
    layer: int


def place_bottleneck(
    config: BottleneckConfig, offered: Mapping[str, OfferedTensor], base: AdapterBase
) -> tuple[Placed, ...]:
    """Place a bottleneck adapter on its base.

    Returns:
        The base's components; those with a bottleneck have an `Adapter(kind="adapter")` with the config of
        `BottleneckSettings.document` and tensors `down.weight`, `down.bias`, `up.weight`, `up.bias` and, if present,
        `norm_before.*`, `norm_after.*`, `scaling`.

    Raises:
        UnsupportedAdapter: A family for which the library's adapters are not well defined.
        WrongBase: Another family, width or depth than the adapter's.
        MalformedCheckpoint: Keys that the library would not write, or a missing bottleneck.
    """
    over = Overlay(base)
    hidden = _width(over, config)
    found: dict[_AdapterSite, dict[str, OfferedTensor]] = defaultdict(dict)
    for key, tensor in sorted(offered.items()):
        if key == _HEAD:
            over.replace(key, "lm_head", "weight", tensor, in_place=True)
            continue
        site, part = _read(key, config)
        if found[site].setdefault(part, tensor) != tensor:
            raise MalformedCheckpoint(f"two different tensors stand for {part} ({key[:200]!r} is the second)")
    sites = set(_sites(config, base))
    _check_complete(sites, set(found), base)
    for site in sorted(sites, key=lambda site: (site.layer, site.kind)):
        parts = found[site]
        _check_parts(parts, _wanted(config, hidden, site.layer), site, base.name)
        digests = {part: tensor.digest for part, tensor in parts.items()}
        over.add((site.kind, site.layer), digests, config.settings.document())
    return over.finished("adapter")


def _width(over: Overlay, config: BottleneckConfig) -> int:
    """Return the base's width, after checking that adapter and base fit together."""
    family = over.family.name
    if config.family != family:
        raise WrongBase(f"the adapter is for a {config.family} model, {over.base.name} is of family {family}")
    if family not in FAMILIES_SUPPORTED:
        raise UnsupportedAdapter(
            f"bottleneck adapters on {family} models are not supported; on {', '.join(FAMILIES_SUPPORTED)} they are"
        )
    table = f"{over.family.prefix}{over.family.embedding[0]}"
    width = over.shape(over.spot(table), table)[1]
    if config.hidden not in (None, width):
        raise WrongBase(f"the adapter is for a width of {config.hidden}, {over.base.name} has {width}")
    return width


def _read(key: str, config: BottleneckConfig) -> tuple[_AdapterSite, str]:
    """Return the site that a key belongs to and the name of its part."""
    match = _KEY.fullmatch(key)
    if match is None or match["name"] != config.name:
        if key.startswith("heads.") or "invertible" in key:
            raise UnsupportedAdapter(f"{key[:200]!r} is of a part beside the bottlenecks, which is not supported")
        raise MalformedCheckpoint(
            f"{key[:200]!r} is not a key that the adapters library writes for the adapter {config.name!r}"
        )
    part = config.settings.parts.get(match["part"])
    if part is None:
        raise MalformedCheckpoint(f"{key[:200]!r} is no part of an adapter with this config")
    return _AdapterSite("attention" if match["where"] == "attention" else "ffn", int(match["layer"])), part


def _sites(config: BottleneckConfig, base: AdapterBase) -> Iterator[_AdapterSite]:
    """Yield the sites at which the config places bottlenecks."""
    for placed in base.components:
        kind = placed.component.kind
        if placed.layer is None or placed.layer in config.leave_out:
            continue
        if kind == "attention" and config.behind_attention:
            yield _AdapterSite("attention", placed.layer)
        elif kind == "ffn" and config.behind_ffn:
            yield _AdapterSite("ffn", placed.layer)


def _check_complete(wanted: set[_AdapterSite], found: set[_AdapterSite], base: AdapterBase) -> None:
    layers = {placed.layer for placed in base.components}
    for site in sorted(found - wanted, key=lambda site: (site.layer, site.kind)):
        if site.layer not in layers:
            raise WrongBase(f"the adapter has layer {site.layer}, which {base.name} does not have")
        raise MalformedCheckpoint(
            f"the adapter holds a bottleneck behind the {site.kind} of layer {site.layer}, which its config leaves out"
        )
    for site in sorted(wanted - found, key=lambda site: (site.layer, site.kind)):
        raise WrongBase(f"the adapter holds no bottleneck behind the {site.kind} of layer {site.layer} of {base.name}")


def _wanted(config: BottleneckConfig, hidden: int, layer: int) -> dict[str, Shape]:
    """Return every part of a bottleneck with its shape."""
    settings, rank = config.settings, config.rank(hidden, layer)
    shapes: dict[str, Shape] = {
        "down.weight": (rank, hidden),
        "down.bias": (rank,),
        "up.weight": (hidden, rank),
        "up.bias": (hidden,),
    }
    for name, there in (("norm_before", settings.norm_before), ("norm_after", settings.norm_after)):
        if there:
            shapes.update({f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)})
    if not isinstance(settings.scaling, float):
        shapes["scaling"] = (1,) if settings.scaling == "learned" else (hidden,)
    return shapes


def _check_parts(
    parts: Mapping[str, OfferedTensor], wanted: Mapping[str, Shape], site: _AdapterSite, base: str
) -> None:
    where = f"of the bottleneck behind the {site.kind} of layer {site.layer}"
    for part, shape in wanted.items():
        if part not in parts:
            raise MalformedCheckpoint(f"the adapter holds no {part} {where}")
        if parts[part].shape != shape:
            raise WrongBase(
                f"{part} {where} has shape {list(parts[part].shape)}; for {base} and this config it must be "
                f"{list(shape)}"
            )
