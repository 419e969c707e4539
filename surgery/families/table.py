"""The table of architectures: the component that each key of a checkpoint belongs to, and the defaults of its settings.

A row says how a family's files are cut into components (BL-01). It is data: no torch, no transformers. The modules that
run the components are in `surgery.modules.components`, by the same family name.

Norms belong to the component that follows them in pre-norm models, and to their own component if they follow its linear
layers (sandwich and post-norm). In families where attention and ffn read the same input (parallel residual), the two
cannot be separated: their finest cut is the `layer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zoo.errors import MalformedCheckpoint, UnknownFamily


@dataclass(frozen=True)
class Family:
    """One row. Key parts are the first dotted segments below the base prefix or below a layer."""

    name: str
    #: Prefix of the base model's keys on disk. A base-model checkpoint lacks it.
    prefix: str
    #: The stack of layers, below the prefix.
    stack: str
    embedding: tuple[str, ...]
    #: Below the prefix; the head itself (`lm_head.`) is beside it.
    final: tuple[str, ...]
    attention: tuple[str, ...] = ()
    ffn: tuple[str, ...] = ()
    #: Parts of a layer that cannot be separated, if that is the finest cut.
    whole: tuple[str, ...] = ()
    head: str = "lm_head"
    #: Other spellings of the prefix in older checkpoints (OPT's base model has `decoder.`).
    other_prefixes: tuple[str, ...] = ()
    #: Keys that old checkpoints contain and no module reads (causal masks, inverse frequencies): kept for export only.
    unread: str = r"(^|\.)(rotary_emb\.inv_freq|masked_bias)$"
    #: Defaults of settings, so that a missing field equals one written out.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: Other spellings of a setting -> the spelling that is compared (transformers' `attribute_map` and similar).
    aliases: Mapping[str, str] = field(default_factory=dict)
    rope_theta: float | None = 10000.0
    partial_rotary: float = 1.0
    tied_by_default: bool = False
    #: Its layers compute attention with an explicit mask instead of transformers' attention interface: they cannot read
    #: pages, so only the dense executor runs it.
    masked: bool = False

    @property
    def parallel(self) -> bool:
        return bool(self.whole)


_GATED = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
_LLAMA = {
    "prefix": "model.",
    "stack": "layers",
    "embedding": ("embed_tokens",),
    "final": ("norm",),
    "attention": ("input_layernorm", "self_attn"),
    "ffn": ("post_attention_layernorm", "mlp"),
}
#: Message for a masked family's models if something needs the attention interface.
DENSE_ONLY = (
    "transformers runs its attention outside the attention interface, so pages cannot be reached: only the "
    "dense executor runs it"
)


def _row(name: str, **values: Any) -> Family:
    return Family(name=name, **values)


_ROWS = (
    _row("llama", **_LLAMA, defaults={**_GATED, "attention_bias": False, "mlp_bias": False}),
    _row("mistral", **_LLAMA, defaults={**_GATED, "sliding_window": 4096, "num_key_value_heads": 8}),
    _row("qwen2", **_LLAMA, defaults={**_GATED, "num_key_value_heads": 32}),
    _row("qwen3", **_LLAMA, defaults={**_GATED, "attention_bias": False, "head_dim": 128, "num_key_value_heads": 32}),
    _row(
        "gemma2",
        **{
            **_LLAMA,
            "attention": ("input_layernorm", "self_attn", "post_attention_layernorm"),
            "ffn": ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
        },
        tied_by_default=True,
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
        },
    ),
    _row(
        "phi3",
        **_LLAMA,
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    _row(
        "glm4",
        **{
            **_LLAMA,
            "attention": ("input_layernorm", "self_attn", "post_self_attn_layernorm"),
            "ffn": ("post_attention_layernorm", "mlp", "post_mlp_layernorm"),
        },
        partial_rotary=0.5,
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 0.00000015625,
            "attention_bias": True,
            "head_dim": 128,
            "num_key_value_heads": 2,
        },
    ),
    _row(
        "olmo2",
        **{
            **_LLAMA,
            "attention": ("self_attn", "post_attention_layernorm"),
            "ffn": ("mlp", "post_feedforward_layernorm"),
        },
        defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False},
    ),
    _row(
        "mixtral",
        **{**_LLAMA, "ffn": ("post_attention_layernorm", "mlp", "block_sparse_moe")},
        rope_theta=1e6,
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "num_key_value_heads": 8,
        },
    ),
    _row(
        "gpt2",
        prefix="transformer.",
        stack="h",
        embedding=("wte", "wpe"),
        final=("ln_f",),
        attention=("ln_1", "attn"),
        ffn=("ln_2", "mlp"),
        rope_theta=None,
        tied_by_default=True,
        unread=r"(^|\.)attn\.(bias|masked_bias)$",
        aliases={"hidden_size": "n_embd", "num_attention_heads": "n_head"},
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
        },
    ),
    _row(
        "opt",
        prefix="model.decoder.",
        other_prefixes=("decoder.",),
        stack="layers",
        embedding=("embed_tokens", "embed_positions", "project_in"),
        final=("final_layer_norm", "project_out"),
        attention=("self_attn_layer_norm", "self_attn"),
        ffn=("final_layer_norm", "fc1", "fc2"),
        rope_theta=None,
        tied_by_default=True,
        defaults={
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
    ),
    _row(
        "gpt_neox",
        prefix="gpt_neox.",
        stack="layers",
        embedding=("embed_in",),
        final=("final_layer_norm",),
        whole=("input_layernorm", "post_attention_layernorm", "attention", "mlp"),
        head="embed_out",
        partial_rotary=0.25,
        unread=r"(^|\.)(rotary_emb\.inv_freq|attention\.(bias|masked_bias))$",
        defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": True, "attention_bias": True},
    ),
    _row(
        "phi",
        prefix="model.",
        stack="layers",
        embedding=("embed_tokens",),
        final=("final_layernorm",),
        whole=("input_layernorm", "self_attn", "mlp"),
        partial_rotary=0.5,
        defaults={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "qk_layernorm": False},
    ),
    _row(
        "bloom",
        prefix="transformer.",
        stack="h",
        embedding=("word_embeddings", "word_embeddings_layernorm"),
        final=("ln_f",),
        attention=("input_layernorm", "self_attention"),
        ffn=("post_attention_layernorm", "mlp"),
        rope_theta=None,
        tied_by_default=True,
        masked=True,
        aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head"},
        defaults={
            "layer_norm_epsilon": 1e-5,
            "apply_residual_connection_post_layernorm": False,
            "slow_but_exact": False,
        },
    ),
    _row(
        "falcon",
        prefix="transformer.",
        stack="h",
        embedding=("word_embeddings",),
        final=("ln_f",),
        whole=("input_layernorm", "ln_attn", "ln_mlp", "post_attention_layernorm", "self_attention", "mlp"),
        tied_by_default=True,
        masked=True,
        aliases={"n_embed": "hidden_size"},
        defaults={
            "layer_norm_epsilon": 1e-5,
            "alibi": False,
            "bias": False,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "activation": "gelu",
        },
    ),
    _row(
        "gptj",
        prefix="transformer.",
        stack="h",
        embedding=("wte",),
        final=("ln_f",),
        whole=("ln_1", "attn", "mlp"),
        rope_theta=None,  # its layers rotate by tables of their own
        masked=True,
        unread=r"(^|\.)attn\.(bias|masked_bias|embed_positions)$",
        aliases={"hidden_size": "n_embd", "num_attention_heads": "n_head"},
        defaults={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "rotary_dim": 64},
    ),
    _row(
        "mpt",
        prefix="transformer.",
        stack="blocks",
        embedding=("wte",),
        final=("norm_f",),
        attention=("norm_1", "attn"),
        ffn=("norm_2", "ffn"),
        rope_theta=None,
        tied_by_default=True,
        masked=True,
        aliases={"hidden_size": "d_model", "num_attention_heads": "n_heads"},
        defaults={
            "layer_norm_epsilon": 1e-5,
            "expansion_ratio": 4,
            "learned_pos_emb": True,
            "no_bias": True,
            "embedding_fraction": 1.0,
            "norm_type": "low_precision_layernorm",
        },
    ),
)

FAMILIES: Mapping[str, Family] = {row.name: row for row in _ROWS}


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the row for a `config.json`.

    Raises:
        UnknownFamily: No such row; the message lists the known ones.
        MalformedCheckpoint: There is no `model_type`.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or not name:
        raise MalformedCheckpoint("config.json names no model_type")
    if name not in FAMILIES:
        raise UnknownFamily(f"unknown family {name!r}; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def layer_count(config: Mapping[str, Any]) -> int:
    """Return the number of layers in a config. Raises MalformedCheckpoint if it has none."""
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 100_000:
            return value
    raise MalformedCheckpoint("config.json has no usable number of layers")


def is_tied(config: Mapping[str, Any], family: Family) -> bool:
    """Return whether the head uses the embedding's matrix."""
    value = config.get("tie_word_embeddings")
    return family.tied_by_default if value is None else bool(value)


def rope_of(config: Mapping[str, Any], family: Family) -> dict[str, Any] | None:
    """Return the rotary settings in one spelling, whichever of transformers' three a config uses."""
    if family.rope_theta is None:
        return None
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = {key: value for key, value in dict(given).items() if value is not None}
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
        del rope["type"]
    if family.name == "phi3" and rope.get("rope_type") in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    theta = config.get("rope_theta") or config.get("rotary_emb_base") or family.rope_theta
    partial = config.get("partial_rotary_factor") or config.get("rotary_pct") or family.partial_rotary
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", theta)
    rope.setdefault("partial_rotary_factor", partial)
    if rope["rope_type"] != "default":
        rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return {key: _as_float(value) for key, value in rope.items()}


def _as_float(value: Any) -> Any:
    """Return whole numbers as floats, also inside lists: 1 and 1.0 are one setting."""
    if isinstance(value, list):
        return [_as_float(each) for each in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def is_unread(family: Family, key: str) -> bool:
    """Return whether no module reads a disk key."""
    return re.search(family.unread, key) is not None
