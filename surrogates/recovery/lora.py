"""Low-rank adapters on the linear layers of a block for training, merged into the matrices at the end.

learners = attach_(block, rank, generator)       # every linear layer that may change; B is zero, so the block's
                                                 output is unchanged
… train learners.parameters …
learners.merge_()                                # W += B A, the plain layers back in their places
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.adapters.lowrank import LowRankLinear
from surrogates.block import ParentBlock


@dataclass(frozen=True)
class _Site:
    """The place of a learner: attribute `name` of `parent`."""

    parent: nn.Module
    name: str
    plain: nn.Module
    learner: LowRankLinear


@dataclass(frozen=True)
class Learners:
    """All learners of a block, in its order."""

    sites: tuple[_Site, ...]

    @property
    def parameters(self) -> list[Tensor]:
        """A [rank, in] and B [out, rank] of each, float32."""
        return [weight for site in self.sites for weight in (site.learner.a, site.learner.b)]

    @torch.no_grad()
    def merge_(self) -> None:
        """Add every product to its matrix and remove the learners."""
        for site in self.sites:
            weight: Tensor = site.plain.weight  # type: ignore[assignment]
            added = site.learner.scaling * (site.learner.b @ site.learner.a)
            weight.add_((added if isinstance(site.plain, nn.Linear) else added.mT).to(weight.dtype))
            setattr(site.parent, site.name, site.plain)


def attach_(block: ParentBlock, rank: int, generator: torch.Generator) -> Learners:
    """Attach a learner to every linear layer of the changed components.

    Its rank is `rank`, or the layer's smaller side if that is less.
    """
    sites: list[_Site] = []
    for part in (block.parts[at] for at in block.changed):
        for parent in list(part.modules()):
            for name, child in list(parent.named_children()):
                size = linear_size(child)
                if size is not None:
                    sites.append(_site(parent, name, child, size, rank, generator))
    return Learners(tuple(sites))


def linear_size(module: nn.Module) -> tuple[int, int] | None:
    """Return (out, in) of a linear layer, including GPT-2's Conv1D; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if type(module).__name__ == "Conv1D":
        rows, columns = module.weight.shape  # type: ignore[misc]
        return int(columns), int(rows)
    return None


def _site(
    parent: nn.Module, name: str, child: nn.Module, size: tuple[int, int], rank: int, generator: torch.Generator
) -> _Site:
    out, into = size
    rank = min(rank, out, into)
    device = next(child.parameters()).device
    a = (torch.rand(rank, into, generator=generator) * 2 - 1) / math.sqrt(into)
    learner = LowRankLinear(child, a.to(device), torch.zeros(out, rank, device=device), None, 1.0)
    learner.a.requires_grad_(True)
    learner.b.requires_grad_(True)
    setattr(parent, name, learner)
    return _Site(parent, name, child, learner)
