"""Check a checkpoint's shapes against its config, before any tensor is read.

The table gives the matrices that a layer must have and their shapes by the config. Beyond the table, all layers must be
alike, as they are in every family here. What a config leaves open is not checked. Uses no digests or bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surgery.families.quantized import check_quantized, plain_shapes
from surgery.families.table import Family, family_of, is_tied, is_unread
from surgery.ingest.cut import spot_of
from zoo.errors import MalformedCheckpoint

Shape = tuple[int, ...]
Wanted = dict[str, Shape]


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes from a config.

    Fields:
        hidden: Width of the hidden states.
        heads: Attention heads.
        kv_heads: Key-value heads.
        head: Width of a head.
        inner: Inner width of the ffn.
        vocab: Rows of the token table.
    """

    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocab: int

    @property
    def q(self) -> int:
        return self.heads * self.head

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head


def check_shapes(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
    """Compare every tensor that a family's modules read with its config.

    Args:
        config: The `config.json`.
        shapes: disk key -> shape, over all weight files.

    Raises:
        UnknownFamily: No row for the architecture.
        MalformedCheckpoint: The first tensor that is missing, or has another shape than the config or the other layers
            give.
    """
    family = family_of(config)
    check_quantized(config, shapes)
    layers: dict[int, Wanted] = defaultdict(dict)
    outer: Wanted = {}
    for key, shape in shapes.items():
        spot = None if is_unread(family, key) else spot_of(family, key)
        if spot is not None and spot.layer is not None:
            layers[spot.layer][spot.name] = shape
        elif spot is not None:
            outer[spot.name] = shape
    _check_alike(layers)
    dims = dims_of(config, family)
    if dims is None:
        return
    for layer, found in layers.items():
        _check(config, found, _TABLE[family.name](dims, config), f"layer {layer}")
    _check(config, outer, _outer(dims, config, family), "the model")


def check_component(config: Mapping[str, Any], kind: str, found: Mapping[str, Shape], where: str) -> None:
    """Compare one component's tensors, by their names within it, with its config. Raises as `check_shapes`."""
    family = family_of(config)
    dims = dims_of(config, family)
    table = f"{family.embedding[0]}.weight"
    if needed := {"embedding": table, "lm_head": "lm_head.weight"}.get(kind):
        wanted = {needed: found.get(needed, ()) if dims is None else _outer(dims, config, family)[table]}
    else:
        roots = {"attention": family.attention, "ffn": family.ffn, "layer": family.whole}[kind]
        layer = {} if dims is None else _TABLE[family.name](dims, config)
        wanted = {name: shape for name, shape in layer.items() if name.split(".", 1)[0] in roots}
    _check(config, found, wanted, where)


def _check(config: Mapping[str, Any], found: Mapping[str, Shape], wanted: Mapping[str, Shape], where: str) -> None:
    found = plain_shapes(config, found, wanted, where)
    for name, shape in wanted.items():
        if name not in found:
            raise MalformedCheckpoint(f"{where} has no {name!r}")
        if found[name] != shape:
            raise MalformedCheckpoint(
                f"{name!r} of {where} has shape {list(found[name])}, but config.json makes it {list(shape)}"
            )


def _check_alike(layers: Mapping[int, Mapping[str, Shape]]) -> None:
    """Check that every layer has the tensors of the first, in the same shapes."""
    if not layers:
        return
    first = min(layers)
    for layer in sorted(layers):
        for name in sorted(layers[first].keys() | layers[layer].keys()):
            mine, others = layers[layer].get(name), layers[first].get(name)
            if mine is None or others is None:
                missing, there = (layer, first) if mine is None else (first, layer)
                raise MalformedCheckpoint(f"layer {missing} has no {name!r}, which layer {there} has")
            if mine != others:
                raise MalformedCheckpoint(
                    f"{name!r} has shape {list(mine)} in layer {layer}, but {list(others)} in layer {first}"
                )


def dims_of(config: Mapping[str, Any], family: Family) -> Dims | None:
    """Return the sizes, or None if the config leaves some of them to a default that is not known here."""
    hidden = _size(config, "n_embd", "n_embed", "d_model", "hidden_size")
    heads = _size(config, "n_head", "n_heads", "num_attention_heads")
    vocab = _size(config, "vocab_size")
    if hidden is None or heads is None or vocab is None:
        return None
    kv_heads = _size(
        config,
        "num_key_value_heads",
        default=None if "num_key_value_heads" in config else family.defaults.get("num_key_value_heads"),
    )
    head = _size(config, "head_dim", default=None if "head_dim" in config else family.defaults.get("head_dim"))
    inner = _size(
        config,
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",
        "intermediate_size",
        default=4 * hidden if family.name in _FOURFOLD else None,
    )
    if family.name in ("bloom", "mpt"):
        inner = 4 * hidden
    if inner is None:
        return None
    return Dims(
        hidden, heads, heads if kv_heads is None else kv_heads, hidden // heads if head is None else head, inner, vocab
    )


#: Families with an ffn four times as wide as the model, unless the config says otherwise.
_FOURFOLD = frozenset({"gpt2", "falcon", "gptj"})


def _size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int | None:
    """Return the first of these settings that is present. Raises MalformedCheckpoint if it is not a size."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 32:
                raise MalformedCheckpoint(f"config.json: {name} is {str(value)[:40]!r}, which is no size")
            return value
    return default


def _outer(dims: Dims, config: Mapping[str, Any], family: Family) -> Wanted:
    """Return the shapes of embedding and head."""
    width = dims.hidden
    if family.name == "opt":
        width = _size(config, "word_embed_proj_dim", default=dims.hidden) or dims.hidden
    wanted: Wanted = {f"{family.embedding[0]}.weight": (dims.vocab, width)}
    if not is_tied(config, family):
        wanted["lm_head.weight"] = (dims.vocab, width)
    return wanted


def _gated(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    wide, narrow = (dims.inner, dims.hidden), (dims.hidden, dims.inner)
    return {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide, "mlp.down_proj.weight": narrow}


def _attention(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    return {
        "self_attn.q_proj.weight": (dims.q, dims.hidden),
        "self_attn.k_proj.weight": (dims.kv, dims.hidden),
        "self_attn.v_proj.weight": (dims.kv, dims.hidden),
        "self_attn.o_proj.weight": (dims.hidden, dims.q),
    }


def _norms(dims: Dims, *names: str) -> Wanted:
    return {f"{name}.weight": (dims.hidden,) for name in names}


def _llama(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    return {
        **_attention(dims, config),
        **_gated(dims, config),
        **_norms(dims, "input_layernorm", "post_attention_layernorm"),
    }


def _qwen3(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    return {**_llama(dims, config), "self_attn.q_norm.weight": (dims.head,), "self_attn.k_norm.weight": (dims.head,)}


def _gemma2(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    return {**_llama(dims, config), **_norms(dims, "pre_feedforward_layernorm", "post_feedforward_layernorm")}


def _phi3(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    return {
        "self_attn.qkv_proj.weight": (dims.q + 2 * dims.kv, dims.hidden),
        "self_attn.o_proj.weight": (dims.hidden, dims.q),
        **_gated_in_one(dims),
        **_norms(dims, "input_layernorm", "post_attention_layernorm"),
    }


def _glm4(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    norms = _norms(
        dims, "input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"
    )
    return {**_attention(dims, config), **_gated_in_one(dims), **norms}


def _gated_in_one(dims: Dims) -> Wanted:
    return {"mlp.gate_up_proj.weight": (2 * dims.inner, dims.hidden), "mlp.down_proj.weight": (dims.hidden, dims.inner)}


def _olmo2(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    wide = {"self_attn.q_norm.weight": (dims.q,), "self_attn.k_norm.weight": (dims.kv,)}
    return {
        **_attention(dims, config),
        **_gated(dims, config),
        **wide,
        **_norms(dims, "post_attention_layernorm", "post_feedforward_layernorm"),
    }


def _mixtral(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    """Return the shapes of a Mixtral layer.

    Experts are checked as far as the router counts them: their names differ between versions, their shapes are the same
    in all layers.
    """
    experts = _size(config, "num_local_experts", "num_experts", default=8) or 8
    wide, narrow = (dims.inner, dims.hidden), (dims.hidden, dims.inner)
    moe: Wanted = {"block_sparse_moe.gate.weight": (experts, dims.hidden)}
    for expert in range(min(experts, 1 << 12)):
        stem = f"block_sparse_moe.experts.{expert}"
        moe.update({f"{stem}.w1.weight": wide, f"{stem}.w2.weight": narrow, f"{stem}.w3.weight": wide})
    return {**_attention(dims, config), **moe, **_norms(dims, "input_layernorm", "post_attention_layernorm")}


def _gpt2(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    """Return the shapes of a GPT-2 layer; Conv1D stores its matrices transposed: [in, out]."""
    return {
        "attn.c_attn.weight": (dims.hidden, 3 * dims.hidden),
        "attn.c_proj.weight": (dims.hidden, dims.hidden),
        "mlp.c_fc.weight": (dims.hidden, dims.inner),
        "mlp.c_proj.weight": (dims.inner, dims.hidden),
        **_norms(dims, "ln_1", "ln_2"),
    }


def _opt(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    square = (dims.hidden, dims.hidden)
    projections = {f"self_attn.{name}.weight": square for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    return {**projections, "fc1.weight": (dims.inner, dims.hidden), "fc2.weight": (dims.hidden, dims.inner)}


def _neox(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    return _fused(dims, "attention", 3 * dims.hidden)


def _bloom(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    return _fused(dims, "self_attention", 3 * dims.hidden)


def _falcon(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    if config.get("new_decoder_architecture"):
        kv_heads = _size(config, "num_kv_heads", default=dims.heads) or dims.heads
        return _fused(dims, "self_attention", (dims.heads + 2 * kv_heads) * (dims.hidden // dims.heads))
    shared = config.get("multi_query", True)
    return _fused(dims, "self_attention", dims.hidden + 2 * (dims.hidden // dims.heads) if shared else 3 * dims.hidden)


def _fused(dims: Dims, attention: str, width: int) -> Wanted:
    return {
        f"{attention}.query_key_value.weight": (width, dims.hidden),
        f"{attention}.dense.weight": (dims.hidden, dims.hidden),
        "mlp.dense_h_to_4h.weight": (dims.inner, dims.hidden),
        "mlp.dense_4h_to_h.weight": (dims.hidden, dims.inner),
    }


def _phi(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    return {
        "self_attn.q_proj.weight": (dims.q, dims.hidden),
        "self_attn.k_proj.weight": (dims.kv, dims.hidden),
        "self_attn.v_proj.weight": (dims.kv, dims.hidden),
        "self_attn.dense.weight": (dims.hidden, dims.q),
        "mlp.fc1.weight": (dims.inner, dims.hidden),
        "mlp.fc2.weight": (dims.hidden, dims.inner),
        **_norms(dims, "input_layernorm"),
    }


def _gptj(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    square = (dims.hidden, dims.hidden)
    projections = {f"attn.{name}.weight": square for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    ffn = {"mlp.fc_in.weight": (dims.inner, dims.hidden), "mlp.fc_out.weight": (dims.hidden, dims.inner)}
    return {**projections, **ffn, **_norms(dims, "ln_1")}


def _mpt(dims: Dims, config: Mapping[str, Any]) -> Wanted:
    return {
        "attn.Wqkv.weight": (3 * dims.hidden, dims.hidden),
        "attn.out_proj.weight": (dims.hidden, dims.hidden),
        "ffn.up_proj.weight": (dims.inner, dims.hidden),
        "ffn.down_proj.weight": (dims.hidden, dims.inner),
        **_norms(dims, "norm_1", "norm_2"),
    }


#: Family -> the tensors that each of its layers must have, by name within the component.
_TABLE: Mapping[str, Callable[[Dims, Mapping[str, Any]], Wanted]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "phi3": _phi3,
    "glm4": _glm4,
    "olmo2": _olmo2,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "opt": _opt,
    "gpt_neox": _neox,
    "phi": _phi,
    "bloom": _bloom,
    "falcon": _falcon,
    "gptj": _gptj,
    "mpt": _mpt,
}
