"""A set of models for tests of chains: parents of several shapes, stitches between them, and chains of their layers."""

from __future__ import annotations

import torch

from tests.chains import put_chain, put_stitch
from tests.runtime.engine.conftest import Bench
from tests.runtime.engine.drive import Drive
from tests.runtime.engine.oracle import ROUNDING, Recomputed

#: Tokens of an answer.
COUNT = 12
PARENTS = ["narrow", "wide", "thin", "neox", "gpt2", "lora", "lora2"]
#: Chains by name, as slices of parents. Neighbouring slices differ in width, heads, head width, FFN width, family or
#: adapter; some chains contain a layer twice.
CHAINS = {
    "stitched": [("narrow", 0, 2), ("wide", 1, 3)],
    "twice stitched": [("narrow", 0, 1), ("wide", 0, 2), ("narrow", 2, 4)],
    "pruned": [("narrow", 0, 2), ("thin", 1, 2), ("narrow", 3, 4)],
    "shifted": [("narrow", 1, 4), ("thin", 0, 1)],
    "of two families": [("neox", 0, 2), ("wide", 1, 3)],
    "of three families": [("gpt2", 0, 1), ("neox", 1, 3), ("narrow", 1, 2)],
    "repeated": [("narrow", 0, 3), ("narrow", 1, 4)],
    "repeated and stitched": [("neox", 0, 2), ("neox", 0, 3), ("wide", 0, 2), ("wide", 1, 2)],
    "with an adapter": [("lora", 0, 2), ("wide", 1, 3)],
    "with several adapters": [("lora", 0, 2), ("narrow", 1, 2), ("lora2", 0, 3)],
}


def add_family(bench: Bench, dtype: str = "float32") -> list[str]:
    """Put the parents, stitches and all chains into the bench's store; return the names of all models."""
    bench.family("llama", "narrow", num_hidden_layers=4, seed=1, dtype=dtype)
    wide = dict(hidden_size=96, intermediate_size=80, num_attention_heads=6, num_key_value_heads=3, head_dim=32)
    bench.family("llama", "wide", seed=2, dtype=dtype, **wide)
    thin = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=40)
    bench.family("llama", "thin", num_hidden_layers=2, seed=3, dtype=dtype, **thin)
    bench.family("gpt_neox", "neox", seed=4, dtype=dtype)
    bench.family("gpt2", "gpt2", seed=5, dtype=dtype)
    bench.lora("narrow", "lora", seed=6)
    bench.lora("narrow", "lora2", seed=7, r=3, target_modules=["q_proj", "down_proj"])
    for a, b in (("narrow", "wide"), ("wide", "narrow"), ("neox", "wide")):
        put_stitch(bench.store, a, b, dtype=getattr(torch, dtype))
    return [*PARENTS, *(put_chain(bench.store, name, *parts) for name, parts in CHAINS.items())]


def agreeing(
    bench: Bench,
    name: str,
    wanted: list[tuple[str, tuple[int, ...]]],
    out: Drive,
    dtype: torch.dtype,
    cast: bool = False,
) -> int:
    """Return how many tokens agree with those of the same model computed outside the engine.

    Fails unless all agree or a tie within the dtype's rounding ends the agreement.
    `cast`: Cast the reference's weights to the dtype.
    """
    answers = bench.answers(f"{name} {cast}", lambda: Recomputed(bench.store, name, dtype if cast else None))
    return sum(answers.agreeing(p, out.tokens(seq), COUNT, ROUNDING[dtype]) for seq, p in wanted)
