"""Tables of the tensor slices that are removed together with a head or a channel (structured pruning, BL-10).

A row of the table says, per tensor, along which dimension its entries belong to which units. Removing a unit removes
its entries from every tensor that lists it, so that the rest computes the same as before without that unit:

    heads     a query head: rows of q, columns of the output projection
    kv        a key-value head: rows of k and v; its query heads go with it
    channels  a channel of the ffn: a row of gate and up (or fc1), a column of down (or fc2)

Fused matrices hold several such segments one after the other. Pure data: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from surgery.families.table import DENSE_ONLY, Family
from zoo.errors import InputError
from zoo.manifest import Component

Unit = Literal["heads", "kv", "channels"]
#: The part of a layer that is pruned. `layer`: both.
Part = Literal["layer", "attention", "ffn"]


@dataclass(frozen=True, slots=True)
class TensorSegment:
    """Consecutive entries along a dimension: all units of a kind in order, `width` entries each.

    A width of 0 stands for the head's dimension.
    """

    unit: Unit
    width: int


@dataclass(frozen=True, slots=True)
class Axis:
    """The segments of tensor `name` (within the component) along `dim`, one after the other."""

    name: str
    dim: int
    segments: tuple[TensorSegment, ...]


_HEADS, _KV, _CHANNELS = TensorSegment("heads", 0), TensorSegment("kv", 0), TensorSegment("channels", 1)


def _linear(path: str, dim: int, *segments: TensorSegment) -> tuple[Axis, ...]:
    """Return the axes of a `Linear` with sliced outputs (dim 0, with the bias) or inputs (dim 1)."""
    weight = Axis(f"{path}.weight", dim, segments)
    return (weight, Axis(f"{path}.bias", 0, segments)) if dim == 0 else (weight,)


def _attention(query: str, key: str, value: str, out: str) -> tuple[Axis, ...]:
    return (*_linear(query, 0, _HEADS), *_linear(key, 0, _KV), *_linear(value, 0, _KV), *_linear(out, 1, _HEADS))


_QKVO = _attention("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = (
    *_linear("mlp.gate_proj", 0, _CHANNELS),
    *_linear("mlp.up_proj", 0, _CHANNELS),
    *_linear("mlp.down_proj", 1, _CHANNELS),
)
_FUSED_GATED = (*_linear("mlp.gate_up_proj", 0, _CHANNELS, _CHANNELS), *_linear("mlp.down_proj", 1, _CHANNELS))
_FIXED_HEADS = "its attention takes the width of a head from the model's width, so that no config describes fewer heads"


@dataclass(frozen=True)
class Prunable:
    """What can be removed in a family.

    Fields:
        attention: Axes to slice, or the reason why it cannot be pruned; `ffn` likewise.
        out: Part -> path of its last linear layer.
        settings: Names of (heads, kv heads, channels) in the family's config.
        turned: Linear layers store their weights as [in, out] (GPT-2's Conv1D).
    """

    attention: tuple[Axis, ...] | str
    ffn: tuple[Axis, ...] | str
    out: Mapping[str, str]
    settings: tuple[str, str, str] = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    turned: bool = False


_OUT = {"attention": "self_attn.o_proj", "ffn": "mlp.down_proj"}
_LLAMA = Prunable(_QKVO, _GATED, _OUT)

_TABLE: Mapping[str, Prunable] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _LLAMA,
    "phi3": Prunable(
        (*_linear("self_attn.qkv_proj", 0, _HEADS, _KV, _KV), *_linear("self_attn.o_proj", 1, _HEADS)),
        _FUSED_GATED,
        _OUT,
    ),
    "glm4": Prunable(_QKVO, _FUSED_GATED, _OUT),
    "olmo2": Prunable(
        "its norms of queries and keys reach over all heads, so that heads are not independent", _GATED, _OUT
    ),
    "mixtral": Prunable(
        _QKVO, "its experts are chosen per token: remove whole experts instead, which is not offered", _OUT
    ),
    "gpt2": Prunable(
        _FIXED_HEADS,
        (
            Axis("mlp.c_fc.weight", 1, (_CHANNELS,)),
            Axis("mlp.c_fc.bias", 0, (_CHANNELS,)),
            Axis("mlp.c_proj.weight", 0, (_CHANNELS,)),
        ),
        {"ffn": "mlp.c_proj"},
        ("n_head", "", "n_inner"),
        turned=True,
    ),
    "opt": Prunable(
        _FIXED_HEADS,
        (*_linear("fc1", 0, _CHANNELS), *_linear("fc2", 1, _CHANNELS)),
        {"ffn": "fc2"},
        ("num_attention_heads", "", "ffn_dim"),
    ),
    "gpt_neox": Prunable(
        _FIXED_HEADS,
        (*_linear("mlp.dense_h_to_4h", 0, _CHANNELS), *_linear("mlp.dense_4h_to_h", 1, _CHANNELS)),
        {"ffn": "mlp.dense_4h_to_h"},
    ),
    "phi": Prunable(
        _attention("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"),
        (*_linear("mlp.fc1", 0, _CHANNELS), *_linear("mlp.fc2", 1, _CHANNELS)),
        {"attention": "self_attn.dense", "ffn": "mlp.fc2"},
    ),
}


def prunable(family: Family) -> Prunable:
    """Return the family's row. Raises InputError for a family that cannot be pruned."""
    if family.name not in _TABLE:
        why = DENSE_ONLY if family.masked else "the family has no table of coupled weights"
        raise InputError(f"{family.name} blocks cannot be pruned: {why}")
    return _TABLE[family.name]


def halves(part: Part) -> tuple[Literal["attention", "ffn"], ...]:
    """Return the halves of a layer that a part consists of."""
    return ("attention", "ffn") if part == "layer" else (part,)


def kinds_of(family: Family, part: Part) -> tuple[str, ...]:
    """Return the kinds of the components that hold a part; parallel families have both halves in one `layer`."""
    return ("layer",) if family.parallel else halves(part)


def axes_of(family: Family, component: Component, part: Part) -> tuple[Axis, ...]:
    """Return the axes to slice in one component when `part` of its layer is pruned.

    Raises:
        InputError: The family's config cannot describe the part with fewer units.
    """
    row = prunable(family)
    found: list[Axis] = []
    for half in halves(part):
        axes = row.attention if half == "attention" else row.ffn
        if isinstance(axes, str):
            other = "" if part == half else f"; prune `--part {'ffn' if half == 'attention' else 'attention'}` alone"
            raise InputError(f"the {half} of {family.name} cannot be pruned: {axes}{other}")
        if component.kind in (half, "layer"):
            found += axes
    names = {name for name, _ in component.tensors}
    return tuple(axis for axis in found if axis.name in names)
