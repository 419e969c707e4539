"""Mixtral's router and experts, with products whose sums do not depend on how many tokens share an expert.

They compute what transformers' modules do, each expert over its own tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runtime.engine.layers.matmul import Multiply


class ExpertRouter(nn.Module):
    """transformers' `MixtralTopKRouter`: x [tokens, width] -> logits, weights and numbers of each token's experts."""

    def __init__(self, stock: Any, multiply: Multiply) -> None:
        super().__init__()
        self.weight, self.top_k, self.multiply = stock.weight, int(stock.top_k), multiply

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.multiply(x.reshape(-1, self.weight.shape[1]), self.weight)
        weights, experts = torch.topk(torch.softmax(logits.float(), dim=-1), self.top_k, dim=-1)
        return logits, weights / weights.sum(dim=-1, keepdim=True), experts


class RoutedExperts(nn.Module):
    """transformers' `MixtralExperts`: each token's experts, weighted and summed in the order of their numbers."""

    def __init__(self, stock: Any, multiply: Multiply) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = stock.gate_up_proj, stock.down_proj, stock.act_fn
        self.multiply = multiply

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, width]; experts, weights [tokens, experts of a token]. Returns the shape of x."""
        out = torch.zeros_like(x)
        for expert in sorted(set(experts.flatten().tolist())):
            token, place = torch.where(experts == expert)
            gate, up = self.multiply(x[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            made = self.multiply(self.act_fn(gate) * up, self.down_proj[expert]) * weights[token, place, None]
            out.index_add_(0, token, made.to(out.dtype))
        return out


_FORMS = {"MixtralTopKRouter": ExpertRouter, "MixtralExperts": RoutedExperts}


def share_experts_(module: nn.Module, multiply: Multiply) -> None:
    """Replace the routers and experts below `module`, in place. The weights are not copied."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            form = _FORMS.get(type(child).__name__)
            if form is not None:
                setattr(parent, name, form(child, multiply))
