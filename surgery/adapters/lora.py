"""Place a PEFT LoRA on its base's components (BL-03), as low-rank parts or whole replaced tensors.

Works on names and shapes only; it never reads a tensor's bytes, a file or the catalogue. The reference is what peft
0.21 does with the same folder.
"""

from __future__ import annotations

from collections.abc import Mapping

from surgery.adapters.lora_config import LoraConfig
from surgery.adapters.lora_keys import LoraKey, ReplacedKey, read_key
from surgery.adapters.overlay import AdapterBase, OfferedTensor, Overlay, Shape
from surgery.ingest.cut import ComponentSpot
from zoo.errors import MalformedCheckpoint, UnsupportedAdapter, WrongBase
from zoo.manifest import Placed


def place_lora(config: LoraConfig, offered: Mapping[str, OfferedTensor], base: AdapterBase) -> tuple[Placed, ...]:
    """Place a LoRA on its base.

    Args:
        config: The parsed `adapter_config.json`.
        offered: Every key of its weight file.

    Returns:
        The base's components, in order. Components with whole tensors in the adapter have these replaced; those with
        low-rank parts have an `Adapter(kind="lora")`. Its config is `{"modules": {<path in the component>: {"r",
        "scaling", "fan_in_fan_out", "embedding" (if it is one), "dora" (if it is)}}}`, its tensors
        `<path>.lora_A.weight` and so on.

    Raises:
        WrongBase: A module or tensor that the base does not have, or a shape that does not fit; names the first.
        UnsupportedAdapter: A variant that cannot be run exactly.
        MalformedCheckpoint: Keys that PEFT would not write.
    """
    return _Placing(config, offered, base).run()


class _Placing:
    """State of one run of `place_lora`."""

    def __init__(self, config: LoraConfig, offered: Mapping[str, OfferedTensor], base: AdapterBase) -> None:
        self._config = config
        self._offered = offered
        self._over = Overlay(base, config.saved)

    def run(self) -> tuple[Placed, ...]:
        keys = {key: read_key(key) for key in sorted(self._offered)}
        adapted = self._low_rank_modules(keys)
        for module, tensors in adapted.items():
            self._add_low_rank(module, tensors)
        for key, part in keys.items():
            if isinstance(part, ReplacedKey):
                self._add_whole(key, part, part.module in adapted)
        self._over.check_saved(part.module for part in keys.values() if isinstance(part, ReplacedKey))
        return self._over.finished("lora")

    def _low_rank_modules(self, keys: Mapping[str, LoraKey | ReplacedKey]) -> dict[str, dict[str, OfferedTensor]]:
        """Return module -> name below it -> tensor."""
        found: dict[str, dict[str, OfferedTensor]] = {}
        for key, part in keys.items():
            if isinstance(part, LoraKey):
                tensors = found.setdefault(part.module, {})
                if part.name in tensors:
                    raise MalformedCheckpoint(
                        f"two tensors stand for {part.name} of {part.module} ({key!r} is the second)"
                    )
                tensors[part.name] = self._offered[key]
        return found

    def _add_low_rank(self, module: str, tensors: Mapping[str, OfferedTensor]) -> None:
        spot = self._over.spot(module)
        inside = spot.name.removesuffix(".weight")
        self._check_supported(module, spot, tensors)
        outer, inner = self._over.matrix(module)
        embedding = "lora_embedding_A" in tensors
        if embedding:
            outer, inner = inner, outer
        settings = self._config.settings(module)
        wanted = _wanted_shapes(self._config, settings.r, outer, inner, embedding)
        _check_shapes(module, tensors, wanted, self._over.base.name)
        how = {
            "r": settings.r,
            "scaling": settings.scaling,
            "fan_in_fan_out": self._over.transposed(spot),
            **({"embedding": True} if embedding else {}),
            **({"dora": True} if self._config.dora else {}),
        }
        digests = {f"{inside}.{name}": tensor.digest for name, tensor in tensors.items()}
        self._over.add((spot.kind, spot.layer), digests, {"modules": {inside: how}})

    def _check_supported(self, module: str, spot: ComponentSpot, tensors: Mapping[str, OfferedTensor]) -> None:
        if not any(self._config.targeted(each) for each in self._over.tied_together(module)):
            raise MalformedCheckpoint(f"the adapter holds a LoRA for {module}, which its target_modules do not name")
        if self._over.family.name == "mixtral" and spot.kind == "ffn":
            raise UnsupportedAdapter(
                f"a LoRA on the experts or the router of a mixtral model is not supported ({module})"
            )
        if self._config.dora and "lora_embedding_A" in tensors:
            raise UnsupportedAdapter(f"DoRA on an embedding is not supported ({module})")

    def _add_whole(self, key: str, part: ReplacedKey, adapted: bool) -> None:
        if adapted and not part.wrapped:
            raise MalformedCheckpoint(f"{key!r} replaces a tensor of a module that has a LoRA around it")
        copied = part.copied or self._over.copied(part.module)
        self._over.replace(key, part.module, part.leaf, self._offered[key], in_place=part.wrapped or not copied)


def _wanted_shapes(config: LoraConfig, r: int, outer: int, inner: int, embedding: bool) -> dict[str, Shape]:
    """Return every required name below a module, with its shape."""
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
            raise WrongBase(
                f"{name} of {module} has shape {list(tensor.shape)}; for {base} and this config it must be "
                f"{list(shape)}"
            )
