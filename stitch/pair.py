"""The two frozen models that a stitch joins: hidden states of A, and the rest of B.

for layer, hidden in pair.heads(ids, layers): …        # A after its layers, from one pass
entries, final = pair.passes(ids, layers)              # B before its layers, and before its head
final = pair.tail(stitched, ids, layer)                # the rest of B on stitched states; gradients flow through
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from surgery.modules.stack import Stack
from zoo.errors import InputError


class ModelPair:
    """Two models to join. Both stacks are frozen here: none of their parameters gets a gradient."""

    def __init__(self, a: Stack, b: Stack) -> None:
        self.a = a.requires_grad_(False)
        self.b = b.requires_grad_(False)
        self._ends = _by_layer(a, last=True)
        self._begins = _by_layer(b, last=False)
        if not self._ends or not self._begins:
            raise InputError("a stitch joins models with layers")

    @property
    def layers(self) -> tuple[int, int]:
        """Numbers of layers of A and of B."""
        return len(self._ends), len(self._begins)

    @torch.no_grad()
    def heads(self, ids: Tensor, layers: Collection[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield layers of A, from shallow to deep, each with the hidden states [B, T, d_a] after it.

        Runs one pass, up to the deepest layer.
        """
        course, hidden, at = self.a.course(ids), ids, 0
        for layer in sorted(layers):
            end = self._ends[layer]
            hidden, at = self.a.run(hidden, course, at, end), end
            yield layer, hidden

    @torch.no_grad()
    def passes(self, ids: Tensor, layers: Collection[int] = ()) -> tuple[dict[int, Tensor], Tensor]:
        """Return B's hidden states [B, T, d_b] before the given layers, and before its head, in one pass."""
        course, hidden, at = self.b.course(ids), ids, 0
        entries = {}
        for layer in sorted(layers):
            begin = self._begins[layer]
            hidden, at = self.b.run(hidden, course, at, begin), begin
            entries[layer] = hidden
        return entries, self.b.run(hidden, course, at, self.b.end)

    def tail(self, hidden: Tensor, ids: Tensor, layer: int) -> Tensor:
        """Run layers [layer, end) of B on hidden states [B, T, d_b] of all tokens -> states before the head."""
        return self.b.run(hidden.to(self.b.dtype), self.b.course(ids), self._begins[layer], self.b.end)


def _by_layer(stack: Stack, last: bool) -> dict[int, int]:
    """Return layer -> the index of its first component, or the one after its last."""
    found: dict[int, int] = {}
    for index, placed in enumerate(stack.placed):
        if placed.layer is not None:
            found[placed.layer] = index + 1 if last else found.get(placed.layer, index)
    return found
