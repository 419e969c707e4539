"""What goes into the linear layers of a running model: second moments of their inputs, gathered component by component.

Hooks stand on the layers only while a component runs. Knows modules and tokens; nothing of deltas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

#: Inputs of more features than this are measured by their diagonal only: the full moments would take over 128 MiB.
WIDEST = 4096
#: Reads of every row of a table that are taken for granted, as a share of the mean: the text shows only some of the
#: vocabulary.
_GRANTED = 0.1


class Moment:
    """E[x x^T] over all tokens seen: [in, in], or its diagonal [in] where there are too many features.

    A table's inputs are ids: its moment is how often each row is read.
    """

    def __init__(self, features: int, diagonal: bool) -> None:
        self._features = features
        self._diagonal = diagonal or features > WIDEST
        self._sum: Tensor | None = None
        self._tokens = 0

    @property
    def value(self) -> Tensor:
        """Raises RuntimeError when nothing was seen."""
        if self._sum is None:
            raise RuntimeError("the layer saw no tokens")
        return self._sum / self._tokens

    def add_inputs(self, x: Tensor) -> None:
        """Inputs [..., in], or ids of any shape for a table."""
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
    """Let each module's moment see what goes into it. Modules that read the same tensor are measured each."""

    def hook(moment: Moment) -> Any:
        return lambda _, args: moment.add_inputs(args[0])

    handles = [module.register_forward_pre_hook(hook(moments[path])) for path, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
