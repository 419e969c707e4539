"""Read PEFT's `adapter_config.json` of a LoRA: rank and scaling of each module; refuse unsupported variants.

Follows peft 0.21 (`LoraConfig`, `LoraLayer.update_layer`, `get_pattern_key`). This module reads the config alone: no
keys, shapes or base.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from surgery.adapters.fields import SavedModules, count, names_module, number, patterns, saved_modules, targets
from zoo.errors import UnsupportedAdapter

#: Variants that change a module's computation, or the base's weights, beyond a plain low-rank product.
_REFUSED_FIELDS = (
    *(
        "alora_invocation_tokens",
        "arrow_config",
        "kasa_config",
        "layer_replication",
        "megatron_config",
        "monteclora_config",
    ),
    *("target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config"),
)
#: Initialisations that peft repeats on loading, changing the base's weights.
_REFUSED_INITS = ("corda", "loftq", "lora_ga", "olora", "pissa")
_T = TypeVar("_T", int, float)


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Rank and scaling of one module: `scaling * B A x` is added to its output."""

    r: int
    scaling: float


@dataclass(frozen=True)
class LoraConfig:
    """The part of a LoRA's config that inference depends on."""

    r: int
    alpha: float
    rank_stabilised: bool
    dora: bool
    bias: bool
    ranks: tuple[tuple[re.Pattern[str], int], ...]
    alphas: tuple[tuple[re.Pattern[str], float], ...]
    targets: tuple[str, ...] | None
    saved: SavedModules

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> LoraConfig:
        """Read an `adapter_config.json`.

        Raises:
            UnsupportedAdapter: A variant of LoRA that cannot be run exactly.
            MalformedCheckpoint: Values of the wrong type.
        """
        _refuse_variants(config)
        return cls(
            r=count(config.get("r", 8), "r", "rank"),
            alpha=number(config.get("lora_alpha", 8), "lora_alpha"),
            rank_stabilised=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
            bias=bool(config.get("lora_bias")),
            ranks=tuple((key, count(value, "rank_pattern", "rank")) for key, value in patterns(config, "rank_pattern")),
            alphas=tuple((key, number(value, "alpha_pattern")) for key, value in patterns(config, "alpha_pattern")),
            targets=targets(config.get("target_modules")),
            saved=saved_modules(config),
        )

    def settings(self, module: str) -> LoraSettings:
        """Return rank and scaling of a module.

        Args:
            module: Its path in the Hugging Face model (`model.layers.0.self_attn.q_proj`).
        """
        r = _matching(self.ranks, module, self.r)
        alpha = _matching(self.alphas, module, self.alpha)
        return LoraSettings(r, alpha / math.sqrt(r) if self.rank_stabilised else alpha / r)

    def targeted(self, module: str) -> bool:
        """Return whether the config names the module; an expression is taken to match any module."""
        return names_module(self.targets, module)


def _matching(patterns: tuple[tuple[re.Pattern[str], _T], ...], module: str, default: _T) -> _T:
    """Return the value of the first pattern that matches the end of a module's path."""
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _refuse_variants(config: Mapping[str, Any]) -> None:
    for field in _REFUSED_FIELDS:
        if config.get(field):
            raise UnsupportedAdapter(f"this LoRA uses {field}, which is not supported")
    if config.get("use_dora") and config.get("lora_bias"):
        raise UnsupportedAdapter("this LoRA uses use_dora and lora_bias together, which peft does not support")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_REFUSED_INITS):
        raise UnsupportedAdapter(
            f"this LoRA was initialised by {init[:40]!r}, which changes its base's weights when it is loaded; "
            "save it again with peft's path_initial_model_for_weight_conversion"
        )
