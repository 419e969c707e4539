"""Where recorded steps leave their results: buffers that all recordings share.

A recording's memory can be used again by the next recording only if nothing refers to it any more. So results are
copied into buffers of their own (a few microseconds), instead of keeping a buffer for each recording.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Results:
    """Buffers for results of up to `rows` rows each, by place in the step, number of values per row, and dtype."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._buffers: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def clear(self) -> None:
        """Drop all buffers."""
        self._buffers.clear()

    def store(self, made: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copy results [.., rows, values] into the buffers; return them there, in their shapes."""
        return {name: self._stored(at, tensor) for at, (name, tensor) in enumerate(made.items())}

    def _stored(self, at: int, made: Tensor) -> Tensor:
        rows, values = made.numel() // made.shape[-1], made.shape[-1]
        key = at, values, made.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty((self._rows, values), dtype=made.dtype, device=made.device)
        into = self._buffers[key][:rows].view(made.shape)
        into.copy_(made)
        return into
