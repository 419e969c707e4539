"""Make GGUF files of tiny models with the `gguf` package's writer, names and quantisation, as llama.cpp does.

The twin undoes what an ingest does (names, rotary layout, norms) from its own sources: the package's table of names and
llama.cpp's permutation. Block types that the package cannot quantise to get random blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.surgery.meta_twin import sentencepiece_model

#: Family -> settings of a tiny model. Rows of 256 elements fit every block type. transformers reads no other width of
#: qwen3's heads, and no other scale of gemma2's attention, from GGUF.
FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 128},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 256, "sliding_window": 16},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0, "original_max_position_embeddings": 128},
}
VOCAB = 640


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """Return a random model of two layers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": family == "gemma2",
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**settings, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write_gguf(
    model: Any,
    path: Path,
    kind: str | Callable[[str], str] = "F32",
    tokenizer: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    edit: Callable[[Any], None] | None = None,
) -> Path:
    """Write a model as a GGUF file.

    Args:
        kind: Block type of matrices, or a function of a tensor's name there. Vectors are float32, as in real files.
        tokenizer: Metadata without the prefix `tokenizer.ggml.`; None for SentencePiece's.
        extra: More tensors, in float32.
        edit: Called with the writer before it writes.
    """
    import gguf

    family, config = model.config.model_type, model.config
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == family)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, family)
    _add_config(writer, config)
    _add_tokenizer(writer, spaced_vocabulary(config.vocab_size) if tokenizer is None else tokenizer)
    state = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    for key, values in state.items():
        stem, suffix = key.rsplit(".", 1)
        name = f"{names.get_name(stem)}.{suffix}"
        if family == "gemma2" and name.endswith("norm.weight"):
            values = values + 1
        if family == "llama" and ".attn_q." in name:
            values = permute_heads(values, config.num_attention_heads)
        if family == "llama" and ".attn_k." in name:
            values = permute_heads(values, config.num_key_value_heads)
        _add_tensor(writer, name, values, ("F32" if values.ndim < 2 else kind(name) if callable(kind) else kind))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute_heads(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in llama.cpp's order (`LlamaModel.permute` of its converter)."""
    rows = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weights.shape))


def _add_config(writer: Any, config: Any) -> None:
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if config.model_type in ("qwen3", "gemma2"):
        writer.add_key_length(config.head_dim)
    if config.model_type == "gemma2":
        writer.add_sliding_window(config.sliding_window)
    if config.pad_token_id is not None:
        writer.add_pad_token_id(config.pad_token_id)


def _add_tokenizer(writer: Any, tokenizer: Mapping[str, Any]) -> None:
    for key, value in tokenizer.items():
        name = f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)


def _add_tensor(writer: Any, name: str, values: np.ndarray, kind: str) -> None:
    import gguf

    quantised = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        writer.add_tensor(name, values)
        return
    try:
        writer.add_tensor(name, gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    except NotImplementedError:
        elements, nbytes = gguf.GGML_QUANT_SIZES[quantised]
        shape = (*values.shape[:-1], values.shape[-1] // elements * nbytes)
        random = np.random.default_rng(sum(name.encode()))
        writer.add_tensor(name, random.integers(0, 256, shape, dtype=np.uint8), raw_dtype=quantised)


def spaced_vocabulary(rows: int = VOCAB) -> dict[str, Any]:
    """Return SentencePiece's pieces as llama.cpp's converter writes them, padded to `rows`."""
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    found: list[tuple[str, float, int]] = []
    for piece in range(library.get_piece_size()):
        kind = (
            2 if library.is_unknown(piece) else 3 if library.is_control(piece) else 6 if library.is_byte(piece) else 1
        )
        found.append((library.id_to_piece(piece), library.get_score(piece), kind))
    found += [(f"[PAD{number}]", -1000.0, 5) for number in range(len(found), rows)]
    return {
        "model": "llama",
        "tokens": [token for token, _, _ in found],
        "scores": [score for _, score, _ in found],
        "token_type": [kind for _, _, kind in found],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def byte_level_vocabulary(core: Any, pre: str, special: Sequence[str] = ()) -> dict[str, Any]:
    """Return the vocabulary of a byte-level `tokenizers.Tokenizer` as llama.cpp's converter writes it."""
    import json

    model = json.loads(core.to_str())["model"]
    by_id = {number: token for token, number in core.get_vocab().items()}
    tokens = [by_id[number] for number in range(len(by_id))]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in special else 1 for token in tokens],
        "merges": [each if isinstance(each, str) else " ".join(each) for each in model["merges"]],
        "bos_token_id": tokens.index(special[0]) if special else 0,
        "eos_token_id": tokens.index(special[-1]) if special else 0,
    }
