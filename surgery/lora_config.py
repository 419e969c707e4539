"""What PEFT's `adapter_config.json` says of a LoRA: rank and scaling of each module, and the variants that are refused.

Follows peft 0.21 (`LoraConfig`, `LoraLayer.update_layer`, `get_pattern_key`). It sees the config alone: no keys, no shapes, no base.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zoo.errors import MalformedCheckpoint, UnsupportedAdapter

#: Variants that change what a module computes, or the base's weights, in ways that a plain low-rank product does not show.
_REFUSED_FIELDS = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config", "monteclora_config"),
    *("target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config"),
)
#: Initialisations that peft repeats on loading, and that change the base's weights while they run.
_REFUSED_INITS = ("corda", "loftq", "lora_ga", "olora", "pissa")
#: Patterns are regular expressions from strangers: they are kept too small to run away.
_PATTERN_LENGTH = 200
_PATTERN_REPEATS = 4
_PATTERNS_LIMIT = 20_000
_NUMBER_LIMIT = 1e30


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Rank and scaling of one module: its output gains `scaling * B A x`."""

    r: int
    scaling: float


@dataclass(frozen=True)
class LoraConfig:
    """The part of an adapter's config that inference depends on."""

    r: int
    alpha: float
    rank_stabilised: bool
    dora: bool
    bias: bool
    keeps_ties: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: tuple[str, ...] | None
    modules_to_save: tuple[str, ...]

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> LoraConfig:
        """Read an `adapter_config.json`.

        Raises:
            UnsupportedAdapter: another kind of adapter, or a variant of LoRA that cannot be run exactly.
            MalformedCheckpoint: values of the wrong type.
        """
        _refuse_other_kinds(config)
        _refuse_variants(config)
        return cls(
            r=_rank(config.get("r", 8), "r"),
            alpha=_number(config.get("lora_alpha", 8), "lora_alpha"),
            rank_stabilised=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
            bias=bool(config.get("lora_bias")),
            keeps_ties=bool(config.get("ensure_weight_tying")),
            ranks={key: _rank(value, "rank_pattern") for key, value in _patterns(config, "rank_pattern").items()},
            alphas={key: _number(value, "alpha_pattern") for key, value in _patterns(config, "alpha_pattern").items()},
            targets=_targets(config.get("target_modules")),
            modules_to_save=_names(config.get("modules_to_save"), "modules_to_save"),
        )

    def settings(self, module: str) -> LoraSettings:
        """Rank and scaling of a module, by its path in the Hugging Face model (`model.layers.0.self_attn.q_proj`)."""
        r = self.ranks.get(_matching(self.ranks, module), self.r)
        alpha = self.alphas.get(_matching(self.alphas, module), self.alpha)
        return LoraSettings(r, alpha / math.sqrt(r) if self.rank_stabilised else alpha / r)

    def targeted(self, module: str) -> bool:
        """Whether the config names the module, as far as plain names tell; an expression names anything."""
        return self.targets is None or any(module == name or module.endswith("." + name) for name in self.targets)

    def saved(self, module: str) -> bool:
        """Whether the module, or one that it lies in, is replaced as a whole (`modules_to_save`)."""
        return any(module.endswith(name) or f"{name}." in module for name in self.modules_to_save)


def _matching(patterns: Mapping[str, Any], module: str) -> str:
    """The first pattern that matches the end of a module's path; the path itself when none does."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def _refuse_other_kinds(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind is None:
        raise UnsupportedAdapter("adapter_config.json names no peft_type: only PEFT's adapters are read")
    if kind != "LORA":
        raise UnsupportedAdapter(f"adapters of kind {str(kind)[:40]!r} are not supported; LORA is")


def _refuse_variants(config: Mapping[str, Any]) -> None:
    for field in _REFUSED_FIELDS:
        if config.get(field):
            raise UnsupportedAdapter(f"this LoRA uses {field}, which is not supported")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_REFUSED_INITS):
        raise UnsupportedAdapter(
            f"this LoRA was initialised by {init[:40]!r}, which changes its base's weights when it is loaded; "
            "save it again with peft's path_initial_model_for_weight_conversion"
        )


def _patterns(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = config.get(field) or {}
    if not isinstance(value, dict) or len(value) > _PATTERNS_LIMIT:
        raise MalformedCheckpoint(f"adapter_config.json: {field} is not a usable table")
    for key in value:
        _check_pattern(key, field)
    return value


def _check_pattern(pattern: str, field: str) -> None:
    """Refuse expressions whose matching could take exponential time, and those that are none."""
    repeats = len(re.findall(r"[*+?{]", pattern))
    if len(pattern) > _PATTERN_LENGTH or repeats > _PATTERN_REPEATS or re.search(r"\)\s*[*+?{]", pattern):
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds the expression {pattern[:60]!r}, which is too complex to run safely")
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except re.error:
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds {pattern[:60]!r}, which is no regular expression") from None


def _targets(value: Any) -> tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return None
    return _names(value, "target_modules")


def _names(value: Any, field: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise MalformedCheckpoint(f"adapter_config.json: {field} is not a list of names")
    return tuple(sorted(set(value)))


def _rank(value: Any, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 20:
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds {str(value)[:40]!r}, which is no rank")
    return value


def _number(value: Any, field: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds {str(value)[:40]!r}, which is no number")
    if not abs(value) < _NUMBER_LIMIT:
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds a number that is too large")
    return float(value)
