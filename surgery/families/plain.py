"""Read configs of the plain gated shape (llama, mistral, qwen2, qwen3) without transformers, which is slow to import.

    plain_settings({…config.json…}) -> the settings that its modules depend on, or None: something is missing, of
    another type, or not of this shape

Nothing is guessed: a config that relies on a default that differs between versions of the family, or that transformers
would refuse, is not plain, and the caller uses transformers. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PLAIN_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
#: Settings that change modules beyond the plain shape.
_FOREIGN = (
    "rope_scaling",
    "partial_rotary_factor",
    "rotary_pct",
    "use_sliding_window",
    "auto_map",
)


@dataclass(frozen=True, slots=True)
class PlainSettings:
    """The settings that a plain model's modules depend on.

    Fields:
        eps: Epsilon of the norms.
        theta: Base of the rotary angles.
        qkv_bias: The q, k and v projections have a bias; `o_bias` and `ffn_bias` likewise.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    qkv_bias: bool
    o_bias: bool
    ffn_bias: bool
    sliding_window: int | None

    @property
    def head_norms(self) -> bool:
        """Whether each head of q and k has a norm (qwen3)."""
        return self.family == "qwen3"


def plain_settings(config: Mapping[str, Any]) -> PlainSettings | None:
    """Return the settings of a config, or None if it is not plain."""
    family, eps = config.get("model_type"), config.get("rms_norm_eps")
    if (
        family not in PLAIN_FAMILIES
        or any(config.get(name) for name in _FOREIGN)
        or not _is_computed(config.get("quantization_config"))
        or not all(_is_size(config.get(name)) for name in _SIZES)
    ):
        return None
    vocabulary, width, inner, layers, heads, kv_heads, _ = (int(config[name]) for name in _SIZES)
    theta, head_dim = _theta(config), _head_dim(config, family, width, heads)
    if theta is None or head_dim is None or not isinstance(eps, float) or config.get("hidden_act") != "silu":
        return None
    bias, ffn_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    fits = head_dim % 2 == 0 and width % heads == 0 and heads % kv_heads == 0
    if not (fits and _windows(config, family) and isinstance(bias, bool) and isinstance(ffn_bias, bool)):
        return None
    bias, ffn_bias = bias and family in ("llama", "qwen3"), ffn_bias and family == "llama"
    return PlainSettings(
        str(family),
        vocabulary,
        width,
        inner,
        layers,
        heads,
        kv_heads,
        head_dim,
        eps,
        theta,
        bias or family == "qwen2",
        bias,
        ffn_bias,
        config["sliding_window"] if family == "mistral" else None,
    )


def _is_computed(quantization: object) -> bool:
    """Return whether weights are exact, or in a method that changes no module: they are decompressed on loading."""
    return not quantization or (
        isinstance(quantization, Mapping) and quantization.get("quant_method") == "compressed-tensors"
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _theta(config: Mapping[str, Any]) -> float | None:
    """Return the base of unscaled rotary angles, in either spelling; None if absent, ambiguous or scaled."""
    given, plain = config.get("rope_parameters"), config.get("rope_theta")
    if given is None:
        return float(plain) if isinstance(plain, int | float) and not isinstance(plain, bool) and plain > 0 else None
    if (
        plain is not None
        or not isinstance(given, Mapping)
        or set(given) != {"rope_type", "rope_theta"}
        or given["rope_type"] != "default"
    ):
        return None
    return _theta({"rope_theta": given["rope_theta"]})


def _head_dim(config: Mapping[str, Any], family: object, width: int, heads: int) -> int | None:
    given = config.get("head_dim")
    if given is None and family != "qwen3":
        return width // heads
    return given if _is_size(given) else None


def _windows(config: Mapping[str, Any], family: object) -> bool:
    """Return whether all layers attend to all tokens or (mistral) the config itself gives the window."""
    if family == "mistral":
        return "sliding_window" in config and (config["sliding_window"] is None or _is_size(config["sliding_window"]))
    kinds = config.get("layer_types")
    return kinds is None or (
        isinstance(kinds, list) and len(kinds) == config["num_hidden_layers"] and set(kinds) <= {"full_attention"}
    )
