"""Convert Meta's `params.json` to Hugging Face's settings: a pure function.

The arithmetic (feed-forward width, context lengths, rotary scaling of Llama 3.1) is that of transformers'
`convert_llama_weights_to_hf.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zoo.errors import InputError, MalformedCheckpoint

TokenizerKind = Literal["sentencepiece", "tiktoken"]

#: Every setting of Meta's language models. Further ones (vision, experts, quantisation, another vendor's windows)
#: change the computation, so a file that has them is refused.
_KNOWN = frozenset({
    *("dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of", "ffn_dim_multiplier", "norm_eps", "vocab_size"),
    *("rope_theta", "use_scaled_rope", "rope_scaling_factor", "max_seq_len", "max_batch_size"),
})  # fmt: skip
_LARGEST = 1 << 24


@dataclass(frozen=True, slots=True)
class MetaParams:
    """The checked settings of one checkpoint. `vocab_size` is None if the file says -1 (the tokenizer's size)."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    norm_eps: float
    rope_theta: float
    scaled_rope: bool
    rope_factor: float | None
    vocab_size: int | None

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def parse_params(document: Mapping[str, Any]) -> MetaParams:
    """Check the settings of `params.json`.

    Raises:
        MalformedCheckpoint: A setting is missing, of the wrong type or out of range.
        InputError: Settings that Meta's Llama language models do not have.
    """
    inner = document.get("model")
    document = inner if isinstance(inner, dict) else document
    unknown = sorted(set(document) - _KNOWN)
    if unknown:
        raise InputError(
            f"params.json has settings that Meta's Llama language models do not have: {', '.join(unknown[:5])[:200]}"
        )
    return _checked(document)


def _checked(document: Mapping[str, Any]) -> MetaParams:
    dim, heads = _count(document, "dim"), _count(document, "n_heads")
    kv_heads = heads if document.get("n_kv_heads") is None else _count(document, "n_kv_heads")
    if dim % heads or (dim // heads) % 2 or heads % kv_heads:
        raise MalformedCheckpoint(f"params.json: {heads} heads and {kv_heads} key-value heads do not divide dim {dim}")
    vocab = document.get("vocab_size", -1)
    factor = document.get("rope_scaling_factor")
    return MetaParams(
        dim=dim,
        layers=_count(document, "n_layers"),
        heads=heads,
        kv_heads=kv_heads,
        intermediate=_intermediate(document, dim),
        norm_eps=_number(document, "norm_eps"),
        rope_theta=_number(document, "rope_theta", 10000.0),
        scaled_rope=document.get("use_scaled_rope") is True,
        rope_factor=None if factor is None else _number(document, "rope_scaling_factor"),
        vocab_size=None if vocab == -1 else _count(document, "vocab_size"),
    )


def _intermediate(document: Mapping[str, Any], dim: int) -> int:
    """Return the width of the feed-forward layers: 8/3 of dim, times the multiplier, rounded up to a multiple."""
    multiple = 256 if document.get("multiple_of") is None else _count(document, "multiple_of")
    multiplier = 1.0 if document.get("ffn_dim_multiplier") is None else _number(document, "ffn_dim_multiplier")
    return multiple * ((int(multiplier * int(8 * dim / 3)) + multiple - 1) // multiple)


def _count(document: Mapping[str, Any], name: str) -> int:
    value = document.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LARGEST:
        raise MalformedCheckpoint(
            f"params.json: {name} must be a whole number from 1 to {_LARGEST}, not {_shown(value)}"
        )
    return value


def _number(document: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = document.get(name)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
        raise MalformedCheckpoint(f"params.json: {name} must be a positive number, not {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    return repr(value)[:40]


def context_length(params: MetaParams, tokenizer: TokenizerKind) -> int:
    """Return the number of positions that the model was trained for, which the file does not contain.

    Llama 3.1 and later scale the rotary angles, Llama 3 uses tiktoken, Code Llama has a larger theta, and Llama 1
    differs from Llama 2 by its epsilon (an early Llama 2 7B with Llama 1's epsilon gets the smaller bound).
    """
    if tokenizer == "tiktoken":
        return 131072 if params.scaled_rope else 8192
    if params.rope_theta > 10000.0:
        return 16384
    return 2048 if params.norm_eps < 5e-6 else 4096


def rope_scaling(params: MetaParams, tied: bool) -> dict[str, Any] | None:
    """Return Llama 3.1's scaling of the rotary angles.

    The factor is 8, or 32 for Llama 3.2, the only ones with tied head and embedding (text models).
    """
    if not params.scaled_rope:
        return None
    return {
        "rope_type": "llama3",
        "factor": params.rope_factor or (32.0 if tied else 8.0),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def hf_config(
    params: MetaParams,
    *,
    tokenizer: TokenizerKind,
    bos: int,
    eos: tuple[int, ...],
    vocab_size: int,
    dtype: str,
    tied: bool,
) -> dict[str, Any]:
    """Return the `config.json` of the same model.

    Rotary settings use the old spelling, which every version of transformers reads.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        "head_dim": params.head_dim,
        "hidden_act": "silu",
        "hidden_size": params.dim,
        "initializer_range": 0.02,
        "intermediate_size": params.intermediate,
        "max_position_embeddings": context_length(params, tokenizer),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": params.heads,
        "num_hidden_layers": params.layers,
        "num_key_value_heads": params.kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": params.norm_eps,
        "rope_scaling": rope_scaling(params, tied),
        "rope_theta": params.rope_theta,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": vocab_size,
    }
