"""Score how much each head and channel of a block matters (BL-10): first-order Taylor, or weight size as its control.

Taylor (Molchanov et al. 2019; LLM-Pruner, Ma et al. 2023, equation 3): removing a weight w changes the loss by about |w
dL/dw|. A unit's score is the sum over its coupled weights, summed over batches of calibration text. L is the language
model's own loss, through the frozen tail; the distance to the block's own outputs would not do, since its gradient is
zero at the exact weights.

Only sums per unit are kept between batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from surrogates.block import ParentBlock, States, Subject
from surrogates.pruning.groups import Axis
from surrogates.pruning.plan import BlockShape, SliceScores
from surrogates.pruning.prune import unit_sums
from zoo.errors import InputError

Importance = Literal["taylor", "magnitude"]
_BATCH = 8


class _Sums:
    """Running scores per layer and kind of unit.

    Args:
        axes: `axes[i]` are those of component i.
        layers: `layers[i]` is the layer of component i, counted from the block's first.
    """

    def __init__(self, shape: BlockShape, axes: Sequence[Sequence[Axis]], layers: Sequence[int]) -> None:
        self._shape = shape
        self._axes = axes
        self._layers = layers
        self._sums: dict[tuple[int, str], Tensor] = {}

    def add(self, component: int, axis: Axis, values: Tensor) -> None:
        for unit, added in unit_sums(axis, self._shape, values).items():
            key = (self._layers[component], unit)
            before = self._sums.get(key)
            self._sums[key] = added.cpu() if before is None else before + added.cpu()

    def scores(self) -> list[SliceScores]:
        return [
            SliceScores(
                *(
                    self._sums.get((layer, unit), torch.zeros(self._shape.units(unit))).tolist()
                    for unit in ("heads", "kv", "channels")
                )
            )
            for layer in range(max(self._layers) + 1)
        ]


def magnitude(
    block: ParentBlock, shape: BlockShape, axes: Sequence[Sequence[Axis]], layers: Sequence[int]
) -> list[SliceScores]:
    """Return the sum of squares of each unit's weights, which orders them by L2 norm.

    There is one entry per layer of the block.
    """
    sums = _Sums(shape, axes, layers)
    for at, names in enumerate(block.names):
        for axis in axes[at]:
            sums.add(at, axis, names[axis.name].detach().square())
    return sums.scores()


def taylor(
    subject: Subject,
    block: ParentBlock,
    states: States,
    shape: BlockShape,
    axes: Sequence[Sequence[Axis]],
    layers: Sequence[int],
) -> list[SliceScores]:
    """Return |w dL/dw| per unit, summed over batches of `states`. One entry per layer of the block.

    Args:
        block: The exact block.

    Raises:
        InputError: A gradient is not finite.
    """
    sums = _Sums(shape, axes, layers)
    sliced = [(at, axis, block.names[at][axis.name]) for at in range(len(block.names)) for axis in axes[at]]
    learning(block, {f"{at}.{axis.name}": weight for at, axis, weight in sliced})
    try:
        for batch in states.batches(subject.windows_at_once(states.ids.shape[1], _BATCH), subject.device):
            loss = language_loss(subject.tail(block(batch.inputs, block.course(batch.ids)), batch.ids), batch.ids)
            gradients = torch.autograd.grad(loss, [weight for _, _, weight in sliced])
            if not all(bool(gradient.isfinite().all()) for gradient in gradients):
                raise InputError(
                    f"the gradients of {subject.manifest.name} are not finite on this text: try `--importance "
                    "magnitude`"
                )
            for (at, axis, weight), gradient in zip(sliced, gradients, strict=True):
                sums.add(at, axis, (weight.detach() * gradient).abs())
    finally:
        block.requires_grad_(False)
    return sums.scores()


def learning(block: ParentBlock, weights: Mapping[str, Tensor]) -> None:
    """Enable gradients for these weights of a block, and disable all its other gradients."""
    block.requires_grad_(False)
    for weight in weights.values():
        weight.requires_grad_(True)


def language_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token. `logits` [B, T, vocabulary], `ids` [B, T]."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
