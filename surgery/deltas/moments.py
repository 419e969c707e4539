"""Second moments of the inputs of a running model's linear layers, gathered component by component.

Hooks are installed on the layers only while a component runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

#: Inputs with more features than this are measured by their diagonal only: the full moments would take over 128 MiB.
WIDEST = 4096
#: Reads assumed of every row of a table, as a share of the mean: the text contains only part of the vocabulary.
_GRANTED = 0.1


class Moment:
    """E[x x^T] over all tokens seen: [in, in], or its diagonal [in] if there are too many features.

    A table's inputs are ids: its moment is how often each row is read.
    """

    def __init__(self, features: int, diagonal: bool) -> None:
        self._features = features
        self._diagonal = diagonal or features > WIDEST
        self._sum: Tensor | None = None
        self._tokens = 0

    @property
    def value(self) -> Tensor:
        """The moment. Raises RuntimeError if no inputs were added."""
        if self._sum is None:
            raise RuntimeError("the layer saw no tokens")
        return self._sum / self._tokens

    def add_inputs(self, x: Tensor) -> None:
        """Add inputs [..., in], or ids of any shape for a table."""
        if not x.is_floating_point():
            added, count = torch.bincount(x.flatten(), minlength=self._features).double(), x.numel()
            added += _GRANTED * count / self._features
        else:
            rows = x.detach().reshape(-1, x.shape[-1]).float()
            added, count = (rows.square().sum(0) if self._diagonal else rows.t() @ rows).double(), len(rows)
        self._sum = added if self._sum is None else self._sum + added
        self._tokens += count


@contextmanager
def watched(modules: Mapping[str, nn.Module], moments: Mapping[str, Moment]) -> Iterator[None]:
    """Add each module's inputs to its moment in the context. Modules that share a tensor are measured separately."""

    def hook(moment: Moment) -> Any:
        return lambda _, args: moment.add_inputs(args[0])

    handles = [module.register_forward_pre_hook(hook(moments[path])) for path, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
