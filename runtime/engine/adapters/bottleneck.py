"""Bottleneck adapters on one half layer, each applied to its own rows; the half's own products cover all rows.

With native kernels each adapter runs over its own rows, so that a row's sums do not depend on the other adapters of
the batch. With torch's products, adapters of the same form are joined as LoRAs are (`runtime.engine.layers.linear`):
two products and a mask for all of them; those with norms of their own, or with a skip over more than the sub-layer's
output, run one by one.

`surgery.adapters.bottleneck_module` defines what an adapter computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.engine.adapters.stack_cache import StackCache
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.layers.activations import Uniform
from runtime.engine.layers.matmul import native_linear
from runtime.engine.step.context import ForwardContext, current
from surgery.adapters.bottleneck_module import BottleneckModule


@dataclass(frozen=True, slots=True)
class _Group:
    """Adapters of one form, joined.

    Fields:
        form: One of them, for the activation and the input that they read.
        ranks: (adapter, rank) in order of the columns.
        down, down_bias, up: [ranks, width], [ranks], [width, ranks].
        up_bias, scaling: [adapters + 1, width]; the last row is zero, for tokens of other adapters or none.
    """

    form: BottleneckModule
    ranks: tuple[tuple[str, int], ...]
    down: Tensor
    down_bias: Tensor
    up: Tensor
    up_bias: Tensor
    scaling: Tensor

    def compute_delta(self, output: Tensor, residual: Tensor, frame: ForwardContext) -> Tensor:
        """Return what is added to the sub-layer's output: zero for tokens without one of these adapters."""
        low = self.form.activation(F.linear(self.form.read(output, residual), self.down, self.down_bias))
        low = low.masked_fill(frame.foreign(self.ranks), 0)
        index = frame.adapter_index(tuple(name for name, _ in self.ranks))
        return (F.linear(low, self.up) + self.up_bias[index]) * self.scaling[index]


@dataclass(frozen=True, slots=True)
class _Active:
    """The adapters of a batch: the joined ones, and those that run alone."""

    groups: tuple[_Group, ...]
    alone: frozenset[str]


def _run_part(part: BottleneckModule, output: Tensor, residual: Tensor) -> Tensor:
    """Run one adapter in its own dtype, and keep what float32 outputs have beyond it."""
    dtype: torch.dtype = part.tensors["up_weight"].dtype
    narrow = output.to(dtype)
    made: Tensor = part(narrow, residual.to(dtype))
    return made if output.dtype == dtype else output + (made.float() - narrow.float())


class BottleneckRows:
    """The bottleneck adapters between a half's sub-layer and its residual connection.

    This is not an `nn.Module`: calling one for every half of every step costs as much as a small product.
    """

    def __init__(self, kernels: Kernels | None = None) -> None:
        self._multiply = None if kernels is None else native_linear(kernels)
        self._parts: dict[str, BottleneckModule] = {}
        self._active: StackCache[_Active] = StackCache()

    @property
    def names(self) -> set[str]:
        """The attached adapters."""
        return set(self._parts)

    @property
    def joins_all(self) -> bool:
        """Whether all attached adapters run joined with others of their form."""
        return all(part.form is not None for part in self._parts.values())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts.values())

    def attach(self, adapter: str, part: BottleneckModule) -> None:
        if self._multiply is not None:
            part.multiply, part.activation = self._multiply, Uniform(part.activation)
        self._parts[adapter] = part
        self._active.clear()

    def detach(self, adapter: str) -> None:
        self._parts.pop(adapter, None)
        self._active.clear()

    def __bool__(self) -> bool:
        """Whether any adapter is attached."""
        return bool(self._parts)

    def __call__(self, output: Tensor, residual: Tensor) -> Tensor:
        """Return what is to be added to the residual. output, residual: [1, tokens, width]."""
        if not self._parts:
            return output
        frame = current()
        if self._multiply is not None:
            return self._run_rows(output, residual, frame)
        names = tuple(dict.fromkeys(span.adapter for span in frame.adapters if span.adapter in self._parts))
        if not names:
            return output
        if len(names) == 1 and frame.covered_by_one:
            return self._parts[names[0]](output, residual)  # type: ignore[no-any-return]
        active = self._active.get_or_make(names, frame, self._sorted)
        out = output if active.groups else output.clone()
        for group in active.groups:
            out = out + group.compute_delta(output, residual, frame)
        for span in frame.adapters:
            if span.adapter in active.alone:
                mine = slice(span.lo, span.hi)
                out[:, mine] = self._parts[span.adapter](output[:, mine], residual[:, mine])
        return out

    def applies(self, frame: ForwardContext) -> bool:
        """Return whether a row of the context has a bottleneck adapter here."""
        return bool(self._parts) and any(span.adapter in self._parts for span in frame.adapters)

    def replace_(self, out: Tensor, output: Tensor, hidden: Tensor, frame: ForwardContext) -> None:
        """Set `out` to `hidden` plus the adapter's result on the rows that have one. All: [1, tokens, width]."""
        for span in frame.adapters:
            if span.adapter in self._parts:
                mine = slice(span.lo, span.hi)
                out[:, mine] = hidden[:, mine] + _run_part(self._parts[span.adapter], output[:, mine], hidden[:, mine])

    def _run_rows(self, output: Tensor, residual: Tensor, frame: ForwardContext) -> Tensor:
        if not self.applies(frame):
            return output
        out = output.clone()
        for span in frame.adapters:
            if span.adapter in self._parts:
                mine = slice(span.lo, span.hi)
                out[:, mine] = _run_part(self._parts[span.adapter], output[:, mine], residual[:, mine])
        return out

    def _sorted(self, names: tuple[str, ...]) -> _Active:
        forms: dict[object, list[str]] = {}
        for name in names:
            forms.setdefault(self._parts[name].form, []).append(name)
        alone = frozenset(forms.pop(None, ()))
        return _Active(tuple(self._stack_cache(each) for each in forms.values()), alone)

    def _stack_cache(self, names: list[str]) -> _Group:
        parts = [self._parts[name] for name in names]
        down, down_bias, up, up_bias = (
            [part.tensors[name].data for part in parts] for name in BottleneckModule.MATRICES
        )
        scaling = [part.scaling_vector for part in parts]
        nothing = torch.zeros_like(up_bias[0])
        return _Group(
            form=parts[0],
            ranks=tuple((name, each.shape[0]) for name, each in zip(names, down, strict=True)),
            down=torch.cat(down),
            down_bias=torch.cat(down_bias),
            up=torch.cat(up, dim=1),
            up_bias=torch.stack([*up_bias, nothing]),
            scaling=torch.stack([*scaling, nothing]),
        )
