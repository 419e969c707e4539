"""Low-rank variants of full fine-tunes, served beside their base.

Their tokens are those that `load()` generates, and they run in the base's own segments.
"""

from __future__ import annotations

import pytest

from surgery.deltas.make import DeltaOptions, delta
from surgery.models.load import load_model
from tests.runtime.engine.drive import drive
from tests.runtime.engine.oracle import greedy, same_tokens
from tests.runtime.engine.test_equality import ask, engine, prompts
from tests.surgery.deltas.tunes import tune, windows


@pytest.mark.parametrize("norms", ["exact", "fold"])
def test_tokens_of_variant_exact_and_base_in_one_batch(bench, norms):
    base = bench.family("llama", f"base-{norms}")
    exact = bench.add(f"fine-{norms}", tune("llama", bench.root / "hf" / f"fine-{norms}"), base=base)
    options = DeltaOptions(6, embeddings="lowrank", norms=norms)
    variant = delta(bench.store, exact, windows(), options).variant
    made = engine(bench, base, exact, variant)
    wanted = {
        name: [(p, f"{name}{i}") for i, p in enumerate(prompts(n, (3, 11)))]
        for n, name in enumerate((base, exact, variant))
    }
    out = drive(made, {0: [ask(name, p, seq) for name, each in wanted.items() for p, seq in each]})
    for name, each in wanted.items():
        with bench.store.catalog.reading() as reader:
            model = load_model(bench.store, reader.model(name))
        for prompt, seq in each:
            assert same_tokens(model, prompt, greedy(model, prompt, 20), out.tokens(seq)) == len(out.tokens(seq)), name


def test_folded_norms_make_the_variants_rows_run_in_the_bases_units(bench):
    base = bench.family("llama", "base-shared")
    exact = bench.add("fine-shared", tune("llama", bench.root / "hf" / "fine-shared"), base=base)
    variant = delta(bench.store, exact, windows(), DeltaOptions(6, embeddings="lowrank", norms="fold")).variant
    alone, both = (engine(bench, *names, kernels="stock").memory() for names in ((base,), (base, variant)))
    with bench.store.catalog.reading() as reader:
        own = sum(tensor.nbytes for tensor in reader.model(variant).tensors) - sum(
            tensor.nbytes for tensor in reader.model(base).tensors
        )
    assert both.weights - alone.weights == own
