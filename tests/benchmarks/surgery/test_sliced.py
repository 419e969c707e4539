"""A narrow model that starts from a wide one's layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.surgery.sliced import sliced_student
from tests.checkpoints import build


@torch.no_grad()
def _probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits.softmax(-1)
    return found


def test_states_that_fit_the_width_are_computed_exactly() -> None:
    """A teacher whose embedding and output matrices reach half of the directions loses nothing at that width."""
    teacher = build("llama")
    turned = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))[0][:, :32]
    with torch.no_grad():
        teacher.model.embed_tokens.weight.copy_(teacher.model.embed_tokens.weight @ turned @ turned.mT)
        for layer in teacher.model.layers:
            for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                matrix.copy_(turned @ turned.mT @ matrix)
    ids = torch.randint(3, 300, (4, 32), generator=torch.Generator().manual_seed(2))
    student = sliced_student(teacher, 32, 3, ids).eval()
    assert student.config.hidden_size == 32
    assert torch.allclose(_probabilities(student, ids), _probabilities(teacher, ids), atol=1e-4)


def test_a_width_or_depth_that_cannot_be_is_refused() -> None:
    teacher, ids = build("llama"), torch.zeros((1, 4), dtype=torch.int64)
    for hidden, layers in ((64, 3), (30, 3), (0, 3), (32, 4), (32, 0)):
        with pytest.raises(ValueError, match=r"multiple of 4 heads|cannot be taken of 3"):
            sliced_student(teacher, hidden, layers, ids)
