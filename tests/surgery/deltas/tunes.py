"""Full fine-tunes of tiny checkpoints: every tensor is changed, by noise or by a few ranks, as in real training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from surgery.deltas.make import Windows
from tests import checkpoints


def tune(
    family: str, folder: Path, *, seed: int = 5, size: float = 0.05, ranks: int | None = None, **options: Any
) -> Path:
    """Save a fine-tune of `checkpoints.build(family)`.

    `ranks`: Number of ranks by which matrices change; by default all.
    """
    model = checkpoints.build(family, **options)
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() != 2:
                parameter.add_((0.05 * noise(*parameter.shape)).to(parameter.dtype))
                continue
            out, into = parameter.shape
            moved = noise(out, into) if ranks is None else noise(out, ranks) @ noise(ranks, into)
            parameter.add_((size * moved * parameter.float().std() / moved.std()).to(parameter.dtype))
    model.save_pretrained(folder)
    checkpoints.tokenizer_files(folder)
    return folder


def windows(count: int = 8, length: int = 24) -> Windows:
    """Return windows of random IDs, different ones for weighting and for scoring."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, checkpoints.VOCAB, (2, count, length), generator=generator)
    return Windows(ids[0], ids[1], "e" * 64)
