"""A PEFT LoRA on its base's components (BL-03): which are touched, by whole tensors or by a low-rank part.

Names and shapes only; it never sees a tensor's bytes, a file or the catalogue. What peft 0.21 does with the same folder is the
oracle: `modules_to_save` gives a module its own copy and leaves a tied partner alone, while a tensor trained in place
(`bias`, embedding layers below a LoRA) changes every module that shares it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from surgery.cut import Spot, spot_of
from surgery.families import FAMILIES, Family
from surgery.lora_config import LoraConfig
from surgery.lora_keys import LowRank, Whole, read_key
from zoo.errors import MalformedCheckpoint, UnsupportedAdapter, WrongBase
from zoo.manifest import Adapter, Component, ComponentKind, Placed, canonical_json

Shape = tuple[int, ...]
_At = tuple[ComponentKind, int | None]


@dataclass(frozen=True, slots=True)
class OfferedTensor:
    """A tensor of the adapter's file. The digest may be any name for it: only equality counts here."""

    shape: Shape
    digest: str


@dataclass(frozen=True)
class LoraBase:
    """What must be known of the base. `shapes`: tensor digest -> shape; `tied`: head and embedding are one parameter."""

    name: str
    family: str
    components: tuple[Placed, ...]
    shapes: Mapping[str, Shape]
    tied: bool


@dataclass
class _Touched:
    """What one component gets, while it is collected."""

    whole: dict[str, str] = field(default_factory=dict)
    low_rank: dict[str, dict[str, str]] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)


def place_lora(config: Mapping[str, Any], offered: Mapping[str, OfferedTensor], base: LoraBase) -> tuple[Placed, ...]:
    """Lay a LoRA over its base.

    Args:
        config: its `adapter_config.json`.
        offered: every key of its weight file.

    Returns:
        The base's components, in order; those that the adapter touches with whole tensors replaced and, where it is of low
        rank, an `Adapter(kind="lora")`. Its config is `{"modules": {<path in the component>: {"r", "scaling",
        "fan_in_fan_out", "embedding" (when it is one), "dora" (when it is)}}}`, its tensors `<path>.lora_A.weight` and so on.

    Raises:
        WrongBase: a module or tensor that the base does not have, or a shape that does not fit; names the first.
        UnsupportedAdapter: another kind, or a variant that cannot be run exactly.
        MalformedCheckpoint: keys or a config that PEFT would not write.
    """
    if not offered:
        raise MalformedCheckpoint("the adapter holds no tensors")
    return _Placing(LoraConfig.parse(config), offered, base).run()


class _Placing:
    """One run of `place_lora`: the three things it looks at, and what it has found so far."""

    def __init__(self, config: LoraConfig, offered: Mapping[str, OfferedTensor], base: LoraBase) -> None:
        self._config = config
        self._offered = offered
        self._base = base
        self._family: Family = FAMILIES[base.family]
        self._components: dict[_At, Component] = {(p.component.kind, p.layer): p.component for p in base.components}
        self._touched: dict[_At, _Touched] = {}

    def run(self) -> tuple[Placed, ...]:
        keys = {key: read_key(key) for key in sorted(self._offered)}
        adapted = self._low_rank_modules(keys)
        for module, tensors in adapted.items():
            self._add_low_rank(module, tensors)
        for key, part in keys.items():
            if isinstance(part, Whole):
                self._add_whole(key, part, part.module in adapted)
        self._check_saved(part.module for part in keys.values() if isinstance(part, Whole))
        return tuple(self._finished(placed) for placed in self._base.components)

    def _low_rank_modules(self, keys: Mapping[str, LowRank | Whole]) -> dict[str, dict[str, OfferedTensor]]:
        """Module -> name below it -> tensor."""
        found: dict[str, dict[str, OfferedTensor]] = {}
        for key, part in keys.items():
            if isinstance(part, LowRank):
                tensors = found.setdefault(part.module, {})
                if part.name in tensors:
                    raise MalformedCheckpoint(f"two tensors stand for {part.name} of {part.module} ({key!r} is the second)")
                tensors[part.name] = self._offered[key]
        return found

    def _add_low_rank(self, module: str, tensors: Mapping[str, OfferedTensor]) -> None:
        spot = self._spot(module)
        inside = spot.name.removesuffix(".weight")
        embedding = "lora_embedding_A" in tensors
        transposed = self._family.name == "gpt2" and spot.layer is not None
        self._check_supported(module, spot, tensors)
        settings = self._config.settings(module)
        weight = self._base_shape(spot, f"{module}.weight")
        if len(weight) != 2:
            raise WrongBase(f"{module} of {self._base.name} is no matrix, a LoRA cannot lie on it")
        outer, inner = weight if not (embedding or transposed) else (weight[1], weight[0])
        wanted = _wanted_shapes(self._config, settings.r, outer, inner, embedding)
        _check_shapes(module, tensors, wanted, self._base.name)
        touched = self._touched.setdefault((spot.kind, spot.layer), _Touched())
        touched.low_rank[inside] = {name: tensor.digest for name, tensor in tensors.items()}
        touched.settings[inside] = {
            "r": settings.r,
            "scaling": settings.scaling,
            "fan_in_fan_out": transposed,
            **({"embedding": True} if embedding else {}),
            **({"dora": True} if self._config.dora else {}),
        }

    def _check_supported(self, module: str, spot: Spot, tensors: Mapping[str, OfferedTensor]) -> None:
        if not any(self._config.targeted(each) for each in self._tied_together(module)):
            raise MalformedCheckpoint(f"the adapter holds a LoRA for {module}, which its target_modules do not name")
        if self._family.name == "mixtral" and spot.kind == "ffn":
            raise UnsupportedAdapter(f"a LoRA on the experts or the router of a {self._family.name} model is not supported ({module})")
        if self._config.dora and "lora_embedding_A" in tensors:
            raise UnsupportedAdapter(f"DoRA on an embedding is not supported ({module})")

    def _add_whole(self, key: str, part: Whole, adapted: bool) -> None:
        if adapted and not part.wrapped:
            raise MalformedCheckpoint(f"{key!r} replaces a tensor of a module that has a LoRA around it")
        spot = self._spot(part.module, part.leaf)
        tensor = self._offered[key]
        expected = self._base_shape(spot, f"{part.module}.{part.leaf}")
        if tensor.shape != expected:
            raise WrongBase(f"{key!r} has shape {list(tensor.shape)}, but {self._base.name} has {list(expected)} there")
        copied = part.copied or any(self._config.saved(each) for each in self._tied_together(part.module))
        in_place = part.wrapped or not copied
        for each in (spot, *self._partners(spot, in_place)):
            whole = self._touched.setdefault((each.kind, each.layer), _Touched()).whole
            if whole.setdefault(each.name, tensor.digest) != tensor.digest:
                raise MalformedCheckpoint(f"two different tensors stand for {part.module}.{part.leaf}")

    def _tied_together(self, module: str) -> tuple[str, ...]:
        """The modules that count as one in peft's lists: with `ensure_weight_tying`, head and embedding of a tied base."""
        pair = ("lm_head", self._family.prefix + self._family.embedding[0])
        return pair if self._config.keeps_ties and self._base.tied and module in pair else (module,)

    def _partners(self, spot: Spot, in_place: bool) -> tuple[Spot, ...]:
        """The other side of a tied pair, when the tensor that both share is changed in place."""
        table = f"{self._family.embedding[0]}.weight"
        if not (in_place and self._base.tied):
            return ()
        if spot.kind == "embedding" and spot.name == table:
            return (Spot("lm_head", None, "lm_head.weight"),)
        if spot.kind == "lm_head" and spot.name == "lm_head.weight":
            return (Spot("embedding", None, table),)
        return ()

    def _spot(self, module: str, leaf: str = "weight") -> Spot:
        spot = spot_of(self._family, f"{module}.{leaf}")
        if spot is None or (spot.kind, spot.layer) not in self._components:
            raise WrongBase(f"the adapter changes {module}, which {self._base.name} ({self._family.name}) does not have")
        return spot

    def _base_shape(self, spot: Spot, path: str) -> Shape:
        digest = dict(self._components[spot.kind, spot.layer].tensors).get(spot.name)
        if digest is None:
            raise WrongBase(f"the adapter changes {path}, which {self._base.name} ({self._family.name}) does not have")
        return self._base.shapes[digest]

    def _check_saved(self, modules: Iterable[str]) -> None:
        present = list(modules)
        for name in self._config.modules_to_save:
            if not any(module.endswith(name) or f"{name}." in module for module in present):
                raise MalformedCheckpoint(f"adapter_config.json says that {name!r} is saved as a whole, but the file does not hold it")

    def _finished(self, placed: Placed) -> Placed:
        touched = self._touched.get((placed.component.kind, placed.layer))
        return placed if touched is None else Placed(placed.layer, _component(placed.component, touched))


def _component(base: Component, touched: _Touched) -> Component:
    tensors = tuple(sorted({**dict(base.tensors), **touched.whole}.items()))
    adapter = None
    if touched.low_rank:
        config = canonical_json({"modules": touched.settings})
        parts = sorted((f"{module}.{name}", digest) for module, names in touched.low_rank.items() for name, digest in names.items())
        adapter = Adapter("lora", config, tuple(parts))
    return Component(base.kind, base.family, base.spec, tensors, adapter)


def _wanted_shapes(config: LoraConfig, r: int, outer: int, inner: int, embedding: bool) -> dict[str, Shape]:
    """Every name that must stand below a module, and its shape."""
    if embedding:
        return {"lora_embedding_A": (r, inner), "lora_embedding_B": (outer, r)}
    shapes: dict[str, Shape] = {"lora_A.weight": (r, inner), "lora_B.weight": (outer, r)}
    if config.bias:
        shapes["lora_B.bias"] = (outer,)
    if config.dora:
        shapes["lora_magnitude_vector"] = (outer,)
    return shapes


def _check_shapes(module: str, tensors: Mapping[str, OfferedTensor], wanted: Mapping[str, Shape], base: str) -> None:
    for name in tensors:
        if name not in wanted:
            raise MalformedCheckpoint(f"the adapter holds {name} for {module}, which its config does not ask for")
    for name, shape in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise MalformedCheckpoint(f"the adapter holds no {name} for {module}")
        if tensor.shape != shape:
            raise WrongBase(f"{name} of {module} has shape {list(tensor.shape)}; for {base} and this config it must be {list(shape)}")
