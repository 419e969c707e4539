"""Twenty variants, one system prompt of 1,000 tokens: prompts cost the private layers' share, with the same bits."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.serving import shared_prompts
from tests.runtime.engine.compiled import needs_kernels

pytestmark = needs_kernels
TINY = {
    "vocab_size": 8192, "max_position_embeddings": 2048, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


@pytest.mark.parametrize("private", [0.5, 0.25])
def test_prompt_work_falls_to_the_share_of_the_private_layers(
    private: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shared_prompts.SHAPES, "tiny", TINY)
    args = argparse.Namespace(
        size="tiny", dtype="bfloat16", kind="lora", variants=20, prompt=1000, own=8, tokens=3, private=private,
        distinct=False, rounds=1,
    )  # fmt: skip
    made, layers = shared_prompts.make_variants(tmp_path, None, args)
    names = [name for name in made if name != "base"]
    found = shared_prompts.compared(shared_prompts.store_of(tmp_path, made), names, layers, args)
    assert found["same_bits"]
    assert private < found["work"] < private + 0.05
    assert found["layer_tokens"]["whole"] == [20 * 1008 * layers]
