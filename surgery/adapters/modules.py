"""Place PEFT's adapters that scale or replace whole modules on their base's components (BL-03): IA3 and LN tuning.

    base_model.model.<module>.ia3_l                          [out, 1]: scales the output; [1, in]: the input of a
                                                             feedforward module
    base_model.model.<module>.ln_tuning_layers.weight        a norm's own copy of a tensor (or that of any targeted
                                                             module)
    base_model.model.<module>.weight                         a whole tensor, by `modules_to_save`
    base_model.model.<module>.base_layer.weight              the head's, which peft also saves if it has an IA3

An IA3 is an `Adapter(kind="ia3")`. LN tuning only replaces tensors, so its components have other norms and no adapter.
Works on names and shapes only; the reference is what peft 0.21 does with the same folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surgery.adapters.fields import SavedModules, check_pattern, names, names_module, saved_modules, targets
from surgery.adapters.lora_keys import PREFIX
from surgery.adapters.overlay import AdapterBase, OfferedTensor, Overlay
from zoo.errors import MalformedCheckpoint, UnsupportedAdapter, WrongBase
from zoo.manifest import Placed

_SCALE = re.compile(r"(?P<module>.+)\.ia3_l(\.default)?")
_NORM = re.compile(r"(?P<module>.+)\.ln_tuning_layers(\.default)?\.(?P<leaf>[^.]+)")
_WHOLE = re.compile(
    r"(?P<module>.+?)((?P<copied>\.modules_to_save(\.default)?)|(?P<wrapped>\.base_layer))?\.(?P<leaf>[^.]+)"
)
#: Parts of names that belong to other adapters, or to wrappers that are not saved.
_STRANGERS = ("lora_", "ia3_", "ln_tuning_", "original_module")


@dataclass(frozen=True)
class ModuleConfig:
    """The part of an IA3's or an LN tuning's config that inference depends on.

    Fields:
        feedforward: Modules with a scaled input, as names or an expression; None to decide by shapes.
    """

    targets: tuple[str, ...] | None
    feedforward: tuple[str, ...] | str | None
    saved: SavedModules

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> ModuleConfig:
        """Read an `adapter_config.json`. Raises MalformedCheckpoint for values of the wrong type."""
        given = config.get("feedforward_modules")
        if isinstance(given, str):
            check_pattern(given, "feedforward_modules")
        feedforward = given if given is None or isinstance(given, str) else names(given, "feedforward_modules")
        return cls(targets(config.get("target_modules")), feedforward, saved_modules(config))

    def scales_input(self, module: str) -> bool | None:
        """Return whether the module is a feedforward one by the config; None if left to the architecture's defaults."""
        if self.feedforward is None:
            return None
        if isinstance(self.feedforward, str):
            return re.fullmatch(self.feedforward, module) is not None
        return any(module.endswith(name) for name in self.feedforward)


def place_ia3(config: ModuleConfig, offered: Mapping[str, OfferedTensor], base: AdapterBase) -> tuple[Placed, ...]:
    """Place an IA3 on its base.

    Returns:
        The base's components; those with scaled modules have an `Adapter(kind="ia3")` with the config `{"modules":
        {<path in the component>: {"input": whether the input is scaled}}}` and tensors `<path>.ia3_l`.

    Raises:
        WrongBase: A module or tensor that the base does not have, or a shape that does not fit; names the first.
        UnsupportedAdapter: Modules that cannot be run exactly.
        MalformedCheckpoint: Keys that PEFT would not write.
    """
    over = Overlay(base, config.saved)
    rest = {}
    seen: set[str] = set()
    for key, tensor in sorted(offered.items()):
        found = _SCALE.fullmatch(_path(key))
        if found is None:
            rest[key] = tensor
        elif found["module"] in seen:
            raise MalformedCheckpoint(f"two tensors scale {found['module']} ({key!r} is the second)")
        else:
            seen.add(found["module"])
            _scale(over, config, found["module"], tensor)
    _replace_saved(over, rest)
    return over.finished("ia3")


def _scale(over: Overlay, config: ModuleConfig, module: str, tensor: OfferedTensor) -> None:
    spot = over.spot(module)
    if not names_module(config.targets, module):
        raise MalformedCheckpoint(f"the adapter holds an ia3_l for {module}, which its target_modules do not name")
    if spot.kind == "embedding" or (over.family.name == "mixtral" and spot.kind == "ffn"):
        raise UnsupportedAdapter(f"IA3 on {module} of a {over.family.name} model is not supported")
    outer, inner = over.matrix(module)
    inputs = config.scales_input(module)
    if inputs is None:
        inputs = tensor.shape == (1, inner)
    wanted = (1, inner) if inputs else (outer, 1)
    if tensor.shape != wanted:
        raise WrongBase(
            f"ia3_l of {module} has shape {list(tensor.shape)}; for {over.base.name} and this config it must be "
            f"{list(wanted)}"
        )
    inside = spot.name.removesuffix(".weight")
    over.add((spot.kind, spot.layer), {f"{inside}.ia3_l": tensor.digest}, {"modules": {inside: {"input": inputs}}})


def place_ln(config: ModuleConfig, offered: Mapping[str, OfferedTensor], base: AdapterBase) -> tuple[Placed, ...]:
    """Place an LN tuning on its base: components with tuned norms get other tensors. Raises as `place_ia3`."""
    over = Overlay(base, config.saved)
    rest = {}
    for key, tensor in sorted(offered.items()):
        found = _NORM.fullmatch(_path(key))
        if ".base_layer." in key:
            raise UnsupportedAdapter(f"LN tuning of an embedding or a head is not supported ({key[:200]!r})")
        if found is None:
            rest[key] = tensor
            continue
        if not names_module(config.targets, found["module"]):
            raise MalformedCheckpoint(f"the adapter holds {found['module']}, which its target_modules do not name")
        over.replace(key, found["module"], found["leaf"], tensor, in_place=False)
    _replace_saved(over, rest)
    return over.finished("ln")


def _replace_saved(over: Overlay, offered: Mapping[str, OfferedTensor]) -> None:
    """Replace whole tensors saved by `modules_to_save`. Raises MalformedCheckpoint for any other key."""
    modules = []
    for key, tensor in offered.items():
        path = _path(key)
        found = _WHOLE.fullmatch(path)
        if found is None or any(name in path for name in _STRANGERS):
            raise MalformedCheckpoint(f"{key[:200]!r} is not a key that PEFT writes for this kind of adapter")
        if not (found["copied"] or found["wrapped"] or over.copied(found["module"])):
            raise MalformedCheckpoint(f"{key[:200]!r} is a whole tensor of a module that modules_to_save does not name")
        over.replace(key, found["module"], found["leaf"], tensor, in_place=bool(found["wrapped"]))
        modules.append(found["module"])
    over.check_saved(modules)


def _path(key: str) -> str:
    path = key.removeprefix(PREFIX)
    if path == key:
        raise MalformedCheckpoint(f"{key[:200]!r} is not a key that PEFT writes: it does not begin with {PREFIX!r}")
    return path
