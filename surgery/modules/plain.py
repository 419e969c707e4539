"""The modules of a model of the plain gated shape, with transformers' names, for callers that run the parts themselves.

    lm_head, model.{embed_tokens, norm}, model.layers.N.{input_layernorm, self_attn, post_attention_layernorm, mlp}

Attention and FFN hold their parts and have no `forward`; the engine's fused halves compute them. Norms and rotary
tables give the same bits as transformers'.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.families.plain import PlainSettings


class Linear(nn.Linear):
    """A linear layer without initialisation, which would make torch import its compiler."""

    def reset_parameters(self) -> None:
        """Do nothing: the weights are assigned later."""


class EmbeddingTable(nn.Embedding):
    """An embedding without initialisation, as `Linear`."""

    def reset_parameters(self) -> None:
        """Do nothing: the weights are assigned later."""


class PlainNorm(nn.Module):
    """RMSNorm with squares in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class PlainRotary(nn.Module):
    """Computes unscaled rotary tables; not part of the model.

    (like, positions [B, T]) -> (cos, sin), each [B, T, head_dim], in the dtype of `like`.
    """

    rope_type = "default"

    def __init__(self, config: PlainSettings) -> None:
        super().__init__()
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
        self.register_buffer("inv_freq", 1.0 / (config.theta**steps), persistent=False)

    @torch.no_grad()
    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        inverse: Tensor = self.get_buffer("inv_freq")
        rows = inverse[None, :, None].expand(positions.shape[0], -1, 1).to(dtype=torch.float, device=like.device)
        with torch.autocast(like.device.type, enabled=False):
            angles = (rows @ positions[:, None, :].float()).transpose(1, 2)
            both = torch.cat((angles, angles), dim=-1)
            return both.cos().to(like.dtype), both.sin().to(like.dtype)


class PlainAttention(nn.Module):
    """The parts of an attention."""

    def __init__(self, config: PlainSettings) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        self.config = config
        self.head_dim = dim
        self.scaling = dim**-0.5
        self.q_proj = Linear(width, config.heads * dim, bias=config.qkv_bias)
        self.k_proj = Linear(width, config.kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = Linear(width, config.kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = Linear(config.heads * dim, width, bias=config.o_bias)
        if config.head_norms:
            self.q_norm, self.k_norm = PlainNorm(dim, config.eps), PlainNorm(dim, config.eps)


class PlainFfn(nn.Module):
    """The parts of a gated FFN."""

    def __init__(self, config: PlainSettings) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(width, inner, bias=config.ffn_bias)
        self.up_proj = Linear(width, inner, bias=config.ffn_bias)
        self.down_proj = Linear(inner, width, bias=config.ffn_bias)
        self.act_fn = nn.SiLU()


class PlainLayer(nn.Module):
    """One layer's parts."""

    def __init__(self, config: PlainSettings) -> None:
        super().__init__()
        self.self_attn, self.mlp = PlainAttention(config), PlainFfn(config)
        self.input_layernorm = PlainNorm(config.hidden_size, config.eps)
        self.post_attention_layernorm = PlainNorm(config.hidden_size, config.eps)


class PlainStem(nn.Module):
    """All modules but the head."""

    def __init__(self, config: PlainSettings) -> None:
        super().__init__()
        self.embed_tokens = EmbeddingTable(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(config.layers))
        self.norm = PlainNorm(config.hidden_size, config.eps)


class PlainModel(nn.Module):
    """A model of the plain gated shape; see the module's docstring."""

    def __init__(self, config: PlainSettings) -> None:
        super().__init__()
        self.model = PlainStem(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
