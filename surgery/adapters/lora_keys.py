"""Parse the keys of a PEFT LoRA file, in all spellings that PEFT has used.

    base_model.model.<module>.lora_A.weight                      low rank, also lora_B.weight and lora_B.bias
    base_model.model.<module>.lora_embedding_A                   low rank of an embedding table
    base_model.model.<module>.lora_magnitude_vector              DoRA
    base_model.model.<module>.weight                             a whole tensor, by `modules_to_save` or trained in
                                                                 place
    base_model.model.<module>.modules_to_save.default.weight     the same, saved by other tools
    base_model.model.<module>.base_layer.bias                    trained in place below a LoRA (`bias`, embedding
                                                                 layers)

A pure reading of names: shapes, the base and the config play no part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zoo.errors import MalformedCheckpoint

PREFIX = "base_model.model."

_LOW_RANK = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB])(\.default)?\.(?P<kind>weight|bias)")
_BARE = re.compile(r"(?P<module>.+)\.(?P<part>lora_embedding_[AB]|lora_magnitude_vector)(\.default)?(\.weight)?")
_WHOLE = re.compile(r"(?P<module>.+?)(?P<wrap>\.modules_to_save(\.default)?|\.base_layer)?\.(?P<leaf>[^.]+)")


@dataclass(frozen=True, slots=True)
class LoraKey:
    """One tensor of a LoRA. `name` is its name below the module: `lora_A.weight`, `lora_embedding_A`, ..."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class ReplacedKey:
    """A tensor that replaces the base's.

    Fields:
        wrapped: The module has a LoRA around it.
        copied: Certainly saved by `modules_to_save`.
    """

    module: str
    leaf: str
    wrapped: bool
    copied: bool


def read_key(key: str) -> LoraKey | ReplacedKey:
    """Parse a key. Raises MalformedCheckpoint for a key that PEFT does not write."""
    path = key.removeprefix(PREFIX)
    if path == key:
        raise MalformedCheckpoint(f"{key[:200]!r} is not a key that PEFT writes: it does not begin with {PREFIX!r}")
    if found := _LOW_RANK.fullmatch(path):
        return LoraKey(found["module"], f"{found['part']}.{found['kind']}")
    if found := _BARE.fullmatch(path):
        return LoraKey(found["module"], found["part"])
    found = _WHOLE.fullmatch(path)
    if found is None or "lora_" in path or "original_module" in path:
        raise MalformedCheckpoint(f"{key[:200]!r} is not a key that PEFT writes for a LoRA")
    wrap = found["wrap"] or ""
    return ReplacedKey(
        found["module"], found["leaf"], wrapped=wrap == ".base_layer", copied=wrap.startswith(".modules_to_save")
    )
