"""Measure the effect of each delta: the change of the predictions when one matrix alone is the base's again.

To first order these divergences add up, so a rank's gain is its share of its matrix's error times the matrix's effect.
This makes gains comparable between a head and an inner projection, which errors of outputs are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.deltas.score import DeltaScores, compare_heads
from surgery.modules.stack import Stack
from surgery.scoring.lens import Lens

#: Lower bound of an effect: smaller values are rounding errors. Such a matrix still gets ranks, last.
_LEAST = 1e-9


class Effects:
    """Measures divergences of one stack from itself with one weight replaced."""

    @torch.inference_mode()
    def __init__(self, stack: Stack, ids: Tensor) -> None:
        """Run the unchanged stack once. `ids` [windows, tokens] is the text to measure on, in one batch."""
        self._stack, self._ids, self._course = stack, ids, stack.course(ids)
        self._last = stack.run(ids, self._course, 0, stack.end)
        self._head = stack.parts[stack.end]
        self._lens = Lens(self._head)

    @torch.inference_mode()
    def measure_effect(self, at: int, before: Tensor, module: nn.Module, weight: Tensor) -> float:
        """Return the KL divergence in nats, mean over tokens, when a module of component `at` has another weight.

        Args:
            before: Input of component `at`: ids if `at` is 0, else hidden states.
            weight: In the module's own layout.
        """
        stack, scores = self._stack, DeltaScores()
        with replaced(module, weight):
            moved = stack.run(before, self._course, at, stack.end)
        lens = Lens(_Replaced(self._head, module, weight)) if at == stack.end else self._lens
        compare_heads(self._last, self._lens, moved, lens, self._ids, scores)
        return max(scores.score.kl, _LEAST)


class _Replaced(nn.Module):
    """A head with another weight for the duration of each call."""

    def __init__(self, head: nn.Module, module: nn.Module, weight: Tensor) -> None:
        super().__init__()
        self._head, self._module, self._weight = head, module, weight

    def forward(self, hidden: Tensor) -> Tensor:
        with replaced(self._module, self._weight):
            logits: Tensor = self._head(hidden)
        return logits


@contextmanager
def replaced(module: Any, weight: Tensor) -> Iterator[None]:
    """Replace a module's weight in the context. A module tied to it keeps the old one."""
    old = module.weight
    module.weight = nn.Parameter(weight.to(old.dtype), requires_grad=False)
    try:
        yield
    finally:
        module.weight = old
