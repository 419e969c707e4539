"""Looked-up rotary tables equal transformers' module bit by bit, for positions in any order."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from runtime.engine.layers.rotary import RotaryTables, looked_up

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def stock(**rope: object) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(LlamaConfig(**SMALL, rope_parameters={"rope_theta": 10000.0, **rope}))


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_angles(rope, dtype):
    module = stock(**rope)
    tables = looked_up(module)
    assert isinstance(tables, RotaryTables)
    like = torch.zeros(1, dtype=dtype)
    for positions in ([[0]], [[5, 3, 5]], [[255, 256, 1000]], [[7]]):
        at = torch.tensor(positions)
        for got, wanted in zip(tables(like, at), module(like, at), strict=True):
            assert got.dtype == dtype and torch.equal(got, wanted)


def test_angles_that_depend_on_the_length_are_computed():
    module = stock(rope_type="dynamic", factor=2.0)
    assert not isinstance(looked_up(module), RotaryTables)
    positions, like = torch.tensor([[5, 3, 300, 7]]), torch.zeros(1)
    for got, wanted in zip(looked_up(module)(like, positions), module(like, positions), strict=True):
        assert torch.equal(got, wanted)
