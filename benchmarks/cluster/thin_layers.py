"""Attention layers behind products of almost no width: a program as it is served, of which attention takes the time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.program import Program, program_of
from runtime.engine.layers.fused import FusedAttention
from runtime.engine.layers.linear import SharedLinear
from runtime.engine.layers.matmul import Panels
from runtime.engine.layers.operations import NativeOperations
from runtime.engine.layers.packed_weights import Packed
from runtime.engine.step.context import AttentionBackend, ForwardContext
from surgery.modules.components import AttentionHalf

#: Width of the hidden states.
HIDDEN = 64


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(HIDDEN), requires_grad=False), 1e-6


class _ThinAttention(nn.Module):
    def __init__(self, kernels: Kernels, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        made, panels = torch.Generator().manual_seed(1), Panels(kernels, narrow=dtype == torch.bfloat16)

        def linear(outputs: int, inputs: int) -> SharedLinear:
            weight = (torch.randn(outputs, inputs, generator=made) / inputs**0.5).to(dtype)
            layer = SharedLinear(weight, None, False)
            layer.pack(Packed(panels, panels.pack(weight)), "")
            return layer

        self.q_proj, self.o_proj = linear(heads * width, HIDDEN), linear(HIDDEN, heads * width)
        self.k_proj, self.v_proj = (linear(kv_heads * width, HIDDEN) for _ in range(2))
        self.head_dim, self.scaling = width, width**-0.5


class ThinLayers:
    """Layers of attention.

    Args:
        layers: The number of each among the layers of the pages, of which several may have the same.
        shape: Heads, heads of K and V, and their width.
        dtype: Of K and V.
    """

    def __init__(
        self, kernels: Kernels, layers: Sequence[int], shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        body = _ThinAttention(kernels, *shape, dtype)
        half = AttentionHalf(body, _Norm(), None, None)
        module = FusedAttention("llama", half, NativeOperations(kernels), dtype == torch.bfloat16)
        made = program_of([module for _ in layers])
        if made is None:
            raise RuntimeError("these layers are none for the kernels")
        self._program: Program = made
        self._layers, self._width = [*layers], shape[2]

    def run(self, hidden: Tensor, attention: AttentionBackend, position: int) -> Tensor:
        """Run hidden states [1, rows, HIDDEN] of one token of each row, all at a position, through all layers."""
        tokens = hidden.shape[1]
        angle = torch.full((1, tokens, self._width), float(position)) / 1e4 ** torch.linspace(0, 1, self._width)
        frame = ForwardContext(torch.full((1, tokens), position), attention.paging.spans, paging=(attention,))
        rotary = angle.cos(), angle.sin()
        if not self._program.takes(hidden, frame, attention.paging, rotary):
            raise RuntimeError("the program does not take this step")
        return self._program.run(hidden, frame, attention, self._layers, rotary)
