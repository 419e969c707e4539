"""What each delta is worth: how far the predictions move when one matrix alone is the base's again.

To first order these divergences add up, so that a rank's gain is its share of its matrix's error times the matrix's
effect: that makes gains comparable between a head and a projection in the middle, which errors of outputs are not.
Knows one fine-tune on a few windows.
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

#: An effect below this is rounding; its matrix still has its turn, last.
_LEAST = 1e-9


class Effects:
    """Divergences of one stack from itself with a weight replaced."""

    @torch.inference_mode()
    def __init__(self, stack: Stack, ids: Tensor) -> None:
        """`ids` [windows, tokens]: what it is measured on, all at once."""
        self._stack, self._ids, self._course = stack, ids, stack.course(ids)
        self._last = stack.run(ids, self._course, 0, stack.end)
        self._head = stack.parts[stack.end]
        self._lens = Lens(self._head)

    @torch.inference_mode()
    def measure_effect(self, at: int, before: Tensor, module: nn.Module, weight: Tensor) -> float:
        """KL divergence in nats, mean over tokens, when a module of component `at` has another weight.

        Args:
            before: what component `at` gets: ids where it is 0, else hidden states.
            weight: in the module's own layout.
        """
        stack, scores = self._stack, DeltaScores()
        with replaced(module, weight):
            moved = stack.run(before, self._course, at, stack.end)
        lens = Lens(_Replaced(self._head, module, weight)) if at == stack.end else self._lens
        compare_heads(self._last, self._lens, moved, lens, self._ids, scores)
        return max(scores.score.kl, _LEAST)


class _Replaced(nn.Module):
    """A head that has another weight while it runs, and only then."""

    def __init__(self, head: nn.Module, module: nn.Module, weight: Tensor) -> None:
        super().__init__()
        self._head, self._module, self._weight = head, module, weight

    def forward(self, hidden: Tensor) -> Tensor:
        with replaced(self._module, self._weight):
            logits: Tensor = self._head(hidden)
        return logits


@contextmanager
def replaced(module: Any, weight: Tensor) -> Iterator[None]:
    """A module with another weight for a while. A partner that is tied to it keeps the old one."""
    old = module.weight
    module.weight = nn.Parameter(weight.to(old.dtype), requires_grad=False)
    try:
        yield
    finally:
        module.weight = old
