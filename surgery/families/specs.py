"""Specs of components: the config's settings that decide what a component computes, in one normal form.

Pure functions of a `config.json` and a row of the table of families. Two components with equal tensors are the same
exactly when their specs are equal. An unknown field therefore counts as relevant: that costs sharing, never exactness.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.families.quantized import settings_of_kind
from surgery.families.table import Family, rope_of

#: Configuration values that never change what a component computes in inference, or that its tensors' shapes show. An
#: unlisted value counts as one that does: an unknown field costs sharing, never exactness.
IRRELEVANT = frozenset(
    """
    _name_or_path _attn_implementation _commit_hash _flash_attn_2_enabled architectures attn_implementation auto_map
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id
    chunk_size_feed_forward dtype torch_dtype finetuning_task id2label label2id problem_type initializer_range init_std
    is_decoder is_encoder_decoder keys_to_ignore_at_inference max_position_embeddings n_positions n_ctx seq_length
    emb_pdrop init_device max_seq_len
    model_type num_hidden_layers n_layer n_layers num_layers layer_types max_window_layers use_sliding_window
    output_attentions output_hidden_states output_past output_router_logits pretraining_tp return_dict
    return_dict_in_generate router_aux_loss_coef router_jitter_noise
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params tie_word_embeddings tokenizer_class transformers_version unsloth_version unsloth_fixed
    use_cache use_bfloat16 torchscript vocab_size word_embed_proj_dim
    attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout dropout activation_dropout layerdrop
    classifier_dropout gradient_checkpointing
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix pruned_heads
    remove_invalid_values repetition_penalty suppress_tokens temperature tf_legacy_loss tie_encoder_decoder top_k top_p
    typical_p cross_attention_hidden_size add_cross_attention quantization_config
    """.split()  # noqa: SIM905
)

_ROPE_KEYS = frozenset(
    {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"}
)


def _layer_type(config: Mapping[str, Any], family: Family, layer: int) -> str | None:
    """Return `sliding_attention` or `full_attention` if a family mixes both, as transformers derives it."""
    types = config.get("layer_types")
    if isinstance(types, list) and layer < len(types):
        return str(types[layer])
    if family.name == "gemma2":
        return "sliding_attention" if (layer + 1) % 2 else "full_attention"
    if family.name in ("qwen2", "qwen3"):
        slides = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
        return "sliding_attention" if slides and layer >= config.get("max_window_layers", 28) else "full_attention"
    return None


def spec_of(config: Mapping[str, Any], family: Family, kind: str, layer: int | None) -> dict[str, Any]:
    """Return the settings that fix what a component computes, without defaults.

    Args:
        kind: The component's kind; only `attention` and `layer` depend on positions and windows.
        layer: Index of its layer; None for embedding and lm_head.
    """
    named = _named(config, family)
    spec = {key: value for key, value in named.items() if not _is_default(key, value, named, family)}
    heads = named.get("num_attention_heads") or named.get("n_head")
    shared_heads = named.get("num_key_value_heads", family.defaults.get("num_key_value_heads"))
    spec["num_key_value_heads"] = heads if shared_heads is None else shared_heads
    quantization = settings_of_kind(config, kind)
    if quantization is not None:
        spec["quantization"] = quantization
    if kind not in ("attention", "layer") or layer is None:
        spec.pop("sliding_window", None)
        return spec
    rope = rope_of(config, family)
    if rope is not None:
        spec["rope"] = rope
    spec.update(_window_of(config, family, layer))
    if spec.get("layer_type") == "full_attention":
        spec.pop("sliding_window", None)
    if config.get("scale_attn_by_inverse_layer_idx"):
        spec["layer_idx"] = layer
    return spec


def _named(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the relevant settings in one spelling. If two spellings are given, the alias wins, as in transformers."""
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT and key not in _ROPE_KEYS}
    inner = relevant.pop("attn_config", None) if family.name == "mpt" else None
    if isinstance(inner, Mapping):  # MPT reads only these of its own table
        relevant |= {key: inner[key] for key in ("clip_qkv", "softmax_scale") if inner.get(key) is not None}
    plain = {key: value for key, value in relevant.items() if key not in family.aliases}
    return {
        **plain,
        **{
            family.aliases[key]: value for key, value in relevant.items() if key in family.aliases and value is not None
        },
    }


def _is_default(key: str, value: Any, named: Mapping[str, Any], family: Family) -> bool:
    """Return whether a setting equals its default. None is a value of its own if the default is not None."""
    if value == family.defaults.get(key):
        return True
    hidden = named.get("hidden_size") or named.get("n_embd")
    heads = named.get("num_attention_heads") or named.get("n_head")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return False
    implied = {"head_dim": hidden // heads} if "head_dim" not in family.defaults else {}
    if family.name == "falcon":
        implied = {"ffn_hidden_size": 4 * hidden, "num_kv_heads": heads}
        if named.get("new_decoder_architecture"):
            implied["num_ln_in_parallel_attn"] = 2
    return key in implied and value == implied[key]


def _window_of(config: Mapping[str, Any], family: Family, layer: int) -> dict[str, Any]:
    """Return the kind of a layer's attention and, where it must be derived, its window."""
    layer_type = _layer_type(config, family, layer)
    if layer_type is None:
        return {}
    if family.name in ("qwen2", "qwen3"):
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        return {"layer_type": layer_type, "sliding_window": window}
    return {"layer_type": layer_type}
