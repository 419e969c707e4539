"""Closed-form refit (BL-10): fit the last linear layer of each half to the outputs of the exact half.

With A [tokens, kept] the layer's inputs after pruning and Y [tokens, width] its wanted outputs, this is ridge
regression towards the existing weights W (similar to Optimal Brain Compression and SliceGPT):

    W' = (A'A + λ I)^-1 (A'Y + λ W)        λ = ridge x mean diagonal of A'A

A constant input is added if the layer has a bias. Only A'A and A'Y are kept, in float64. Halves are fitted in order,
each on the output of the fitted halves before it, so that Y also corrects their errors if the layer's output is added
to the residual directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from surgery.modules.components import ResidualHalf
from surrogates.block import ParentBlock, States
from surrogates.pruning.groups import Prunable

#: Share of the mean diagonal of A'A. It is small, since there are many more tokens than inputs.
RIDGE = 1e-4
_BATCH = 16


@dataclass
class _Moments:
    """Sums of A'A and A'Y."""

    aa: Tensor | None = None
    ay: Tensor | None = None

    def add(self, a: Tensor, y: Tensor) -> None:
        a, y = (each.flatten(0, -2).double() for each in (a, y))
        aa, ay = a.mT @ a, a.mT @ y
        self.aa = aa if self.aa is None else self.aa + aa
        self.ay = ay if self.ay is None else self.ay + ay


@dataclass
class _Seen:
    """A layer's inputs and outputs at its last call."""

    inputs: Tensor = field(default_factory=lambda: torch.empty(0))
    outputs: Tensor = field(default_factory=lambda: torch.empty(0))


@torch.no_grad()
def refit_(
    block: ParentBlock,
    exact: ParentBlock,
    states: States,
    row: Prunable,
    outs: Sequence[Sequence[str]],
    ridge: float = RIDGE,
) -> None:
    """Fit the output layers of a pruned block, in place.

    Args:
        exact: The block that it replaces, with as many components.
        outs: Per component, paths of the layers to fit; none where nothing was removed.
    """
    device = next(block.parameters()).device
    given, wanted = states.inputs, states.inputs
    for at, paths in enumerate(outs):
        for path in paths:
            _fit_(_RefitPlace(block, exact, at, path), states.ids, given, wanted, row.turned, ridge, device)
        given, wanted = _through(block, at, states.ids, given, device), _through(exact, at, states.ids, wanted, device)


@dataclass(frozen=True)
class _RefitPlace:
    """The layer `path` of component `at` in both blocks."""

    block: ParentBlock
    exact: ParentBlock
    at: int
    path: str

    @property
    def pruned_layer(self) -> Any:
        return _layer(self.block, self.at, self.path)

    @property
    def exact_layer(self) -> Any:
        return _layer(self.exact, self.at, self.path)

    @property
    def ends_in_residual(self) -> bool:
        """Whether the layer's output is added to the hidden states unchanged."""
        part = self.block.parts[self.at]
        return isinstance(part, ResidualHalf) and part.post is None and part.after is None


def _fit_(
    place: _RefitPlace, ids: Tensor, given: Tensor, wanted: Tensor, turned: bool, ridge: float, device: torch.device
) -> None:
    moments = _Moments()
    layer = place.pruned_layer
    with _watching(layer) as seen, _watching(place.exact_layer) as target:
        for at in range(0, len(ids), _BATCH):
            rows, before, after = (each[at : at + _BATCH].to(device) for each in (ids, given, wanted))
            place.block.parts[place.at](before, place.block.course(rows).where(place.at, before))
            right = place.exact.parts[place.at](after, place.exact.course(rows).where(place.at, after))
            moments.add(
                _with_constant(seen.inputs, layer.bias), right - before if place.ends_in_residual else target.outputs
            )
    _solve_(layer, moments, turned, ridge)


def _solve_(layer: Any, moments: _Moments, turned: bool, ridge: float) -> None:
    if moments.aa is None or moments.ay is None:
        return
    old = layer.weight if turned else layer.weight.mT
    start = old if layer.bias is None else torch.cat((old, layer.bias[None]))
    strength = ridge * float(moments.aa.diagonal().mean()) + torch.finfo(torch.float32).tiny
    damped = moments.aa + strength * torch.eye(len(moments.aa), dtype=torch.float64, device=moments.aa.device)
    fitted = torch.linalg.solve(damped, moments.ay + strength * start.double())
    if not bool(fitted.isfinite().all()):
        return
    weight = fitted if layer.bias is None else fitted[:-1]
    layer.weight.copy_(weight if turned else weight.mT)
    if layer.bias is not None:
        layer.bias.copy_(fitted[-1])


def _with_constant(inputs: Tensor, bias: Tensor | None) -> Tensor:
    return inputs if bias is None else torch.cat((inputs, torch.ones_like(inputs[..., :1])), -1)


def _through(block: ParentBlock, at: int, ids: Tensor, hidden: Tensor, device: torch.device) -> Tensor:
    out = []
    for begin in range(0, len(ids), _BATCH):
        rows, batch = ids[begin : begin + _BATCH].to(device), hidden[begin : begin + _BATCH].to(device)
        out.append(block.parts[at](batch, block.course(rows).where(at, batch)).cpu())
    return torch.cat(out)


def _layer(block: ParentBlock, at: int, path: str) -> Any:
    """Return the module that holds a named weight of a component."""
    weight = block.names[at][f"{path}.weight"]
    return next(module for module in block.parts[at].modules() if getattr(module, "weight", None) is weight)


@contextmanager
def _watching(layer: nn.Module) -> Iterator[_Seen]:
    seen = _Seen()

    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.inputs, seen.outputs = inputs[0], output

    handle = layer.register_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()
