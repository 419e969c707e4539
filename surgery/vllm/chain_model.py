"""A chain of several models for vLLM, from vLLM's own attention, linear and norm modules.

Its parameters are named as the chain's tensors are (`parts.<i>.<name within the component>`), with q, k, v and gate, up
put together as vLLM does. Halves of a layer are added to the hidden states one by one, as in transformers.

Imported by vLLM only, in its processes. It runs on one pipeline stage; layers are split over tensor-parallel ranks by
vLLM's modules, stitches are computed by each rank. Written against vLLM 0.32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaAttention, LlamaMLP
from vllm.model_executor.models.qwen2 import Qwen2Attention
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from surgery.chains.plan import parse_chain, stitch_of


class VllmChain(nn.Module):
    """The model class that vLLM makes for `BlockZooChainForCausalLM`."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )
    packed_modules_mapping: Mapping[str, list[str]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        described = {"sources": config.sources, "chain": config.chain}
        plan = parse_chain(described)
        sources = [CONFIG_MAPPING[source["model_type"]].from_dict(dict(source)) for source in plan.sources]
        parts: list[nn.Module] = []
        for at, link in enumerate(plan.links):
            name = f"{prefix}.parts.{at}" if prefix else f"parts.{at}"
            if link.source is None:
                spec = stitch_of(at, config.chain[at])
                parts.append(_Stitch(spec.width_in, spec.width_out, spec.position))
            else:
                parts.append(_KINDS[link.kind](sources[link.source], vllm_config, name))
        self.parts = nn.ModuleList(parts)
        self.logits_processor = LogitsProcessor(sources[plan.links[-1].source or 0].vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.parts[0].embed_tokens(input_ids)  # type: ignore[no-any-return, operator]

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the normalized hidden states [tokens, width of the head] of tokens at positions [tokens]."""
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds  # type: ignore[arg-type]
        for part in self.parts[1:]:
            hidden = part(hidden, positions)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        logits: Tensor | None = self.logits_processor(self.parts[-1].lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        return loaded


class _Embedding(nn.Module):
    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)


class _Attention(nn.Module):
    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _attention(config, vllm_config, f"{prefix}.self_attn")

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        added: Tensor = self.self_attn(positions=positions, hidden_states=self.input_layernorm(hidden))
        return hidden + added


class _Ffn(nn.Module):
    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=getattr(config, "mlp_bias", False),
            prefix=f"{prefix}.mlp",
        )

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        added: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + added


class _Head(nn.Module):
    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=f"{prefix}.lm_head")

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.norm(hidden)  # type: ignore[no-any-return]


class _Stitch(nn.Module):
    """One linear layer from one width to another, with the stitch's position as a further input (BL-09)."""

    def __init__(self, width_in: int, width_out: int, position: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in + 1), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width_out), requires_grad=False)
        self.position = position

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        position = hidden.new_full((*hidden.shape[:-1], 1), self.position)
        return F.linear(torch.cat([hidden, position], dim=-1), self.weight, self.bias)


def _attention(config: Any, vllm_config: Any, prefix: str) -> nn.Module:
    """Return vLLM's attention module of a source's family. `prefix` holds the component's number: vLLM's layer."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    common = {"cache_config": vllm_config.cache_config, "prefix": prefix}
    if config.model_type in ("llama", "mistral"):
        plain = copy.copy(config)
        plain.layer_types = None  # no windows here, and vLLM would look them up by the component's number
        bias = getattr(config, "attention_bias", False)
        return LlamaAttention(  # type: ignore[no-any-return]
            plain,
            config.hidden_size,
            heads,
            groups,
            config.max_position_embeddings,
            bias=bias,
            bias_o_proj=bias,
            **common,
        )
    rotary = {"rope_parameters": config.rope_parameters, "max_position": config.max_position_embeddings}
    if config.model_type == "qwen2":
        return Qwen2Attention(config.hidden_size, heads, groups, **rotary, **common)  # type: ignore[no-any-return]
    return Qwen3Attention(  # type: ignore[no-any-return]
        config.hidden_size,
        heads,
        groups,
        **rotary,
        **common,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        qkv_bias=getattr(config, "attention_bias", False),
    )


_KINDS: Mapping[str, type[nn.Module]] = {
    "embedding": _Embedding,
    "attention": _Attention,
    "ffn": _Ffn,
    "lm_head": _Head,
}
