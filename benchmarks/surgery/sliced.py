"""Start a narrow Llama from a wide one: every matrix of some layers, projected to the main directions of its states.

The directions are the principal ones of the normalized hidden states in front of every layer (as in SliceGPT, Ashkboos
et al. 2024, but one basis for all layers). Norm weights go into the matrices behind them, so that the basis may be
turned. The result needs training, but far less than random weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_WINDOWS_AT_ONCE = 4


@torch.no_grad()
def sliced_student(teacher: Any, hidden: int, layers: int, windows: Tensor) -> Any:
    """Return a Llama of another width, with the teacher's heads, FFN width and vocabulary and an untied head.

    Args:
        teacher: A Llama, float32.
        hidden: The student's width, a multiple of the teacher's attention heads and below its width.
        layers: Number of layers, taken from the teacher's at even distances; the first and the last are among them.
        windows: int64 [n, length], text that the directions are found on.

    Raises:
        ValueError: The width is no smaller multiple of the heads, or the teacher has fewer layers.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = teacher.config
    if not 0 < hidden < config.hidden_size or hidden % config.num_attention_heads:
        raise ValueError(
            f"a width of {hidden} is no multiple of {config.num_attention_heads} heads below {config.hidden_size}"
        )
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(f"{layers} layers cannot be taken of {config.num_hidden_layers}")
    settings = {**config.to_dict(), "hidden_size": hidden, "num_hidden_layers": layers, "tie_word_embeddings": False}
    settings["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    student = LlamaForCausalLM(LlamaConfig(**settings))
    basis, share = main_directions(teacher, hidden, windows)
    # The norm divides by the length of what is kept: `share` of the squared length, in fewer dimensions.
    scale = (share * config.hidden_size / hidden) ** 0.5
    student.model.embed_tokens.weight.copy_(teacher.model.embed_tokens.weight @ basis)
    student.lm_head.weight.copy_((teacher.lm_head.weight * teacher.model.norm.weight) @ basis)
    student.model.norm.weight.fill_(scale)
    for at, layer in enumerate(student.model.layers):
        _slice_layer_(layer, teacher.model.layers[_place(at, layers, config.num_hidden_layers)], basis, scale)
    return student


def _place(at: int, layers: int, of: int) -> int:
    return round(at * (of - 1) / max(1, layers - 1))


def main_directions(teacher: Any, hidden: int, windows: Tensor) -> tuple[Tensor, float]:
    """Return an orthonormal basis [width, hidden] and the share of the states' squared length that it keeps."""
    width = teacher.config.hidden_size
    moments = torch.zeros(width, width, dtype=torch.float64)
    for ids in windows.split(_WINDOWS_AT_ONCE):
        states = teacher.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[:-1]
        for state in states:
            rows = torch.nn.functional.normalize(state.flatten(0, 1).float(), dim=-1)
            moments += (rows.mT @ rows).double()
    values, vectors = torch.linalg.eigh(moments)
    return vectors[:, -hidden:].float(), float(values[-hidden:].sum() / values.sum())


def _slice_layer_(layer: Any, source: Any, basis: Tensor, scale: float) -> None:
    """Copy the projected weights of a layer in place."""
    for name in ("q_proj", "k_proj", "v_proj"):
        matrix = getattr(source.self_attn, name).weight
        getattr(layer.self_attn, name).weight.copy_((matrix * source.input_layernorm.weight) @ basis)
    for name in ("gate_proj", "up_proj"):
        matrix = getattr(source.mlp, name).weight
        getattr(layer.mlp, name).weight.copy_((matrix * source.post_attention_layernorm.weight) @ basis)
    layer.self_attn.o_proj.weight.copy_(basis.mT @ source.self_attn.o_proj.weight)
    layer.mlp.down_proj.weight.copy_(basis.mT @ source.mlp.down_proj.weight)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight.fill_(scale)
