"""Architectures of GGUF files: the `config.json` that their metadata describe, and the names of their tensors.

Pure functions of the metadata and the tensor table. Names and values are those of transformers' own GGUF loader. What
it ignores although it changes the computation (rotary factors, soft caps, windows) is set here as the model was
trained, or refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surgery.sources.gguf.header import GgufEntry, GgufHeader
from zoo.errors import InputError, MalformedCheckpoint, UnknownFamily

_LARGEST = 1 << 24
#: The rotary factors of Llama 3.1 and later.
ROPE_FACTORS = "rope_freqs.weight"
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([a-z_]+)\.(weight|bias)")

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_FFN = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_FFN}
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_HEAD = {"output.weight": "lm_head.weight"}


@dataclass(frozen=True)
class GgufArchitecture:
    """One architecture of llama.cpp; its name there is the family's name.

    Fields:
        architectures: transformers' class.
        layer: Tensor of a block -> the module of a layer.
        biased: The tensors of a block that may have a bias.
        permutes: llama.cpp stores q and k with each head's rotary dimensions in pairs; transformers uses halves.
        raises_norms: llama.cpp stores norms as 1 + weight.
        turns_part: Rotary embedding may cover a part of a head.
        settings: Further metadata values -> settings of `config.json`.
    """

    architectures: str
    layer: Mapping[str, str]
    biased: frozenset[str] = frozenset()
    permutes: bool = False
    raises_norms: bool = False
    turns_part: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", _LLAMA, permutes=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", _LLAMA, biased=frozenset({"attn_q", "attn_k", "attn_v"})),
    "qwen3": GgufArchitecture(
        "Qwen3ForCausalLM",
        {**_LLAMA, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    ),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM",
        {
            **_ATTENTION,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            **_FFN,
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        raises_norms=True,
        settings={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        turns_part=True,
        settings={"attention.sliding_window": "sliding_window"},
    ),
}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model as its metadata describe it.

    Fields:
        config: The `config.json`, without a dtype.
    """

    name: str
    architecture: GgufArchitecture
    config: Mapping[str, Any]

    def key_of(self, entry: GgufEntry) -> str | None:
        """Return a tensor's key in transformers' checkpoints; None for rotary factors, which the config holds.

        Raises MalformedCheckpoint if the architecture has no such tensor.
        """
        outer = {**_OUTER, **_HEAD}.get(entry.name)
        if outer is not None:
            return outer
        if entry.name == ROPE_FACTORS and "rope_scaling" in self.config:
            return None
        match = _BLOCK.fullmatch(entry.name)
        module = None if match is None else self.architecture.layer.get(match[2])
        if match is None or module is None or (match[3] == "bias" and match[2] not in self.architecture.biased):
            raise MalformedCheckpoint(f"tensor {entry.name!r} has no place in a {self.name} model")
        return f"model.layers.{match[1]}.{module}.{match[3]}"

    def heads_of(self, entry: GgufEntry) -> int:
        """Return the number of heads in which a tensor's rotary dimensions are stored in pairs; 0 for none."""
        if not self.architecture.permutes:
            return 0
        if ".attn_q." in entry.name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".attn_k." in entry.name else 0

    def is_raised_norm(self, entry: GgufEntry) -> bool:
        """Return whether a tensor is a norm that is stored as 1 + weight."""
        return self.architecture.raises_norms and entry.name.endswith("norm.weight")


def describe_model(header: GgufHeader, rope_factors: Sequence[float] | None) -> GgufModel:
    """Return the model that a header describes.

    Args:
        rope_factors: The values of `rope_freqs.weight`, if the file has it.

    Raises:
        UnknownFamily: An architecture that is not read here.
        InputError: A part of a split model, an adapter, or rotary scaling that is not known.
        MalformedCheckpoint: A value is missing, of the wrong type or out of range.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownFamily(f"GGUF files of architecture {str(name)[:60]!r} are not read; known: {known}")
    values = _Values(header.metadata, name)
    values.refuse_parts()
    architecture = ARCHITECTURES[name]
    tables = {entry.name: entry for entry in header.entries}
    config: dict[str, Any] = {
        **_sizes(values, tables),
        "architectures": [architecture.architectures],
        "model_type": name,
        "rms_norm_eps": values.read_number("attention.layer_norm_rms_epsilon"),
        "rope_theta": values.read_number("rope.freq_base", 10000.0),
        "tie_word_embeddings": not _HEAD.keys() & tables.keys(),
        **values.read_token_ids(),
        **{
            ours: values.read_number(theirs) for theirs, ours in architecture.settings.items() if values.has_key(theirs)
        },
    }
    head: int = config["head_dim"]
    if name == "gemma2":  # not in the metadata: llama.cpp, too, tells the 27B model by its layers
        config["query_pre_attn_scalar"] = (
            config["hidden_size"] // config["num_attention_heads"] if config["num_hidden_layers"] == 46 else head
        )
    turned = values.read_size("rope.dimension_count", head)
    if turned != head:
        if not architecture.turns_part or turned > head:
            raise InputError(f"rotary embedding over {turned} of {head} dimensions of a head is not known for {name}")
        config["partial_rotary_factor"] = turned / head
    if scaling := _rope_scaling(values, config, rope_factors):
        config["rope_scaling"] = scaling
    return GgufModel(name, architecture, config)


@dataclass(frozen=True, slots=True)
class _Values:
    """The metadata of one architecture: keys without the architecture's prefix."""

    metadata: Mapping[str, Any]
    name: str

    def has_key(self, key: str) -> bool:
        return f"{self.name}.{key}" in self.metadata

    def read_size(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.name}.{key}", default)
        if type(value) is not int or not 0 < value <= _LARGEST:
            raise MalformedCheckpoint(
                f"{self.name}.{key} must be a whole number from 1 to {_LARGEST}, not {_shown(value)}"
            )
        return value

    def read_number(self, key: str, default: float | None = None) -> float | int:
        value = self.metadata.get(f"{self.name}.{key}", default)
        if type(value) not in (int, float) or not 0 < value < 1e12:
            raise MalformedCheckpoint(f"{self.name}.{key} must be a positive number, not {_shown(value)}")
        return value  # type: ignore[no-any-return]

    def read_text(self, key: str) -> str | None:
        value = self.metadata.get(f"{self.name}.{key}")
        if value is not None and not isinstance(value, str):
            raise MalformedCheckpoint(f"{self.name}.{key} must be a text, not {_shown(value)}")
        return value

    def read_token_ids(self) -> dict[str, int | None]:
        """Return the ids of special tokens that a config names. None replaces a family's default."""
        found: dict[str, int | None] = {}
        for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
            value = self.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
            if value is not None and (type(value) is not int or not 0 <= value < _LARGEST):
                raise MalformedCheckpoint(f"tokenizer.ggml.{theirs}_token_id is {_shown(value)}, not a token")
            found[f"{ours}_token_id"] = value
        return found

    def refuse_parts(self) -> None:
        """Raise InputError for files that are no whole language model."""
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise InputError(
                "the file is one part of a split model: join the parts with llama-gguf-split --merge first"
            )
        kind = self.metadata.get("general.type", "model")
        if kind != "model":
            raise InputError(f"the file holds {_shown(kind)}, not a model")
        if self.has_key("expert_count") and self.metadata[f"{self.name}.expert_count"] != 0:
            raise UnknownFamily(f"a {self.name} model with experts is not read from GGUF; its safetensors are")


def _sizes(values: _Values, tables: Mapping[str, GgufEntry]) -> dict[str, int]:
    table = tables.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise MalformedCheckpoint("the file has no table of tokens (token_embd.weight)")
    hidden, heads = values.read_size("embedding_length"), values.read_size("attention.head_count")
    kv_heads = values.read_size("attention.head_count_kv", heads)
    turned = (
        values.read_size("rope.dimension_count", hidden // heads or 1) if values.name == "llama" else hidden // heads
    )
    return {
        "head_dim": values.read_size("attention.key_length", turned),
        "hidden_size": hidden,
        "intermediate_size": values.read_size("feed_forward_length"),
        "max_position_embeddings": values.read_size("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": values.read_size("block_count"),
        "num_key_value_heads": kv_heads,
        "vocab_size": table.shape[0],
    }


def _rope_scaling(
    values: _Values, config: Mapping[str, Any], factors: Sequence[float] | None
) -> dict[str, float | str] | None:
    """Return the scaling of the rotary angles.

    Llama 3.1's is in no metadata: the file has its factors, which are computed again here to be sure of the kind.
    """
    kind = values.read_text("rope.scaling.type")
    if factors is not None:
        if kind not in (None, "none") or not factors or not _are_llama3(config, factors):
            raise InputError(
                "the file's rotary factors (rope_freqs) are not Llama 3.1's, so they cannot be served exactly"
            )
        return {
            "rope_type": "llama3",
            "factor": factors[-1],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(values.read_number("rope.scaling.factor"))}
    raise InputError(f"rotary scaling of type {kind[:40]!r} is not read from GGUF; the model's safetensors are")


def _are_llama3(config: Mapping[str, Any], factors: Sequence[float]) -> bool:
    """Return whether the factors are those of Llama 3.1's formula, for the last of them as its factor."""
    head, theta, most = config["head_dim"], config["rope_theta"], factors[-1]
    if len(factors) != head // 2 or not 1 < most < 1e6:
        return False
    for number, factor in enumerate(factors):
        turns = 8192 / (2 * math.pi * theta ** (2 * number / head))
        smooth = min(max((turns - 1) / 3, 0.0), 1.0)
        if not math.isclose(factor, 1 / ((1 - smooth) / most + smooth), rel_tol=1e-3):
            return False
    return True


def _shown(value: object) -> str:
    return repr(value)[:40]
