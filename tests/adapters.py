"""Configs of every kind of PEFT adapter, for every family: `KINDS[kind](family)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CAUSAL = {"task_type": "CAUSAL_LM"}
#: Norms for LN tuning where peft has no defaults, by family.
NORMS = {
    "opt": ["self_attn_layer_norm", "final_layer_norm"],
    "gpt_neox": ["input_layernorm", "post_attention_layernorm"],
    "phi": ["input_layernorm"],
    "olmo2": ["post_attention_layernorm", "post_feedforward_layernorm", "norm"],
    "bloom": ["input_layernorm", "post_attention_layernorm"],
    "falcon": ["ln_attn", "ln_mlp"],
    "gptj": ["ln_1"],
    "mpt": ["norm_1", "norm_2"],
}
DEFAULT_NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
#: (all targets, those with a scaled input) for architectures with other module names than Llama's.
SCALED = {
    "phi3": (["qkv_proj", "down_proj"], ["down_proj"]),
    "gpt2": (["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
    "opt": (["k_proj", "v_proj", "fc2"], ["fc2"]),
    "gpt_neox": (["query_key_value", "dense_4h_to_h"], ["dense_4h_to_h"]),
    "phi": (["k_proj", "v_proj", "fc2"], ["fc2"]),
    "mixtral": (["k_proj", "v_proj"], []),
    "bloom": (["query_key_value", "dense_4h_to_h"], ["dense_4h_to_h"]),
    "falcon": (["query_key_value", "dense_4h_to_h"], ["dense_4h_to_h"]),
    "gptj": (["k_proj", "v_proj", "fc_out"], ["fc_out"]),
    "mpt": (["Wqkv", "down_proj"], ["down_proj"]),
}


def peft(name: str, **options: Any) -> Any:
    """Return a config of the peft class with that name."""
    import peft

    return getattr(peft, name)(**CAUSAL, **options)


def _root(family: str) -> str:
    """Return the family of a variant (`opt` for `opt-prenorm`)."""
    return family.split("-")[0]


def ia3(family: str, **options: Any) -> Any:
    from peft import IA3Config

    targets, inputs = SCALED.get(_root(family), (["k_proj", "v_proj", "down_proj"], ["down_proj"]))
    return IA3Config(
        **CAUSAL, target_modules=targets, feedforward_modules=inputs, fan_in_fan_out=_root(family) == "gpt2", **options
    )


def ln(family: str, **options: Any) -> Any:
    from peft import LNTuningConfig

    norms = ["ln_1", "ln_2", "ln_f"] if _root(family) == "gpt2" else NORMS.get(_root(family), DEFAULT_NORMS)
    return LNTuningConfig(**CAUSAL, target_modules=norms, **options)


def prompt(family: str, **options: Any) -> Any:
    return peft("PromptTuningConfig", **{"num_virtual_tokens": 5, **_TOLD.get(family, {}), **options})


def p_tuning(family: str, **options: Any) -> Any:
    return peft(
        "PromptEncoderConfig",
        **{"num_virtual_tokens": 3, "encoder_hidden_size": 32, **_TOLD.get(family, {}), **options},
    )


def prefix(family: str, **options: Any) -> Any:
    return peft("PrefixTuningConfig", **{"num_virtual_tokens": 6, **options})


#: Settings that peft needs: OPT's embeddings are projected, and peft takes the layers' width for that of the table; MPT
#: has its own config names.
_TOLD: dict[str, dict[str, int]] = {"opt": {"token_dim": 32}, "mpt": {"num_attention_heads": 4}}

KINDS: dict[str, Callable[..., Any]] = {"ia3": ia3, "ln": ln, "prompt": prompt, "p_tuning": p_tuning, "prefix": prefix}
