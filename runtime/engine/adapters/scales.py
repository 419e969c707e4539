"""Adapters' vectors that scale a layer's input or output (IA3, DoRA), each applied to its own rows in one product.

Deals with vectors and with which tokens use which adapter; not with layers or files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.engine.adapters.stack_cache import StackCache
from runtime.engine.step.context import ForwardContext


class Scales:
    """The vectors of one side of a layer, by adapter; in float32 whatever the base's dtype, as peft computes them."""

    def __init__(self) -> None:
        self._vectors: dict[str, Tensor] = {}
        self._tables: StackCache[Tensor] = StackCache()

    def __bool__(self) -> bool:
        return bool(self._vectors)

    @property
    def names(self) -> set[str]:
        """The adapters that have a vector here."""
        return set(self._vectors)

    @property
    def nbytes(self) -> int:
        return sum(vector.numel() * vector.element_size() for vector in self._vectors.values())

    def attach(self, adapter: str, vector: Tensor) -> None:
        """Add an adapter's vector: [width], float32."""
        self._vectors[adapter] = vector
        self._tables.clear()

    def detach(self, adapter: str) -> None:
        self._vectors.pop(adapter, None)
        self._tables.clear()

    def scale_tokens(self, x: Tensor, frame: ForwardContext) -> Tensor:
        """Return x [1, tokens, width] with each token scaled by its adapter's vector, if it has one here.

        The result is float32; the caller rounds it once.
        """
        active = tuple(dict.fromkeys(s.adapter for s in frame.adapters if s.adapter in self._vectors))
        if not active:
            return x
        if len(active) == 1 and frame.covered_by_one:
            return x * self._vectors[active[0]]
        return x * self._tables.get_or_make(active, frame, self._stacked)[frame.adapter_index(active)]

    def _stacked(self, active: tuple[str, ...]) -> Tensor:
        """Return [adapters + 1, width]: their vectors, and ones for all other tokens."""
        vectors = [self._vectors[name] for name in active]
        return torch.stack([*vectors, torch.ones_like(vectors[0])])
