"""Every kind of adapter served beside its base and beside others gives peft's tokens."""

from __future__ import annotations

import pytest
from peft import PeftModel

from runtime.config import BatchingConfig
from tests import checkpoints
from tests.adapters import KINDS
from tests.runtime.engine.drive import drive
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.engine.test_equality import FUSED, ask, engine, prompts


def peft_reference(bench, base: str, name: str):
    return PeftModel.from_pretrained(reference(bench.folders[base]), bench.folders[name]).eval()


def check(model, wanted, out) -> None:
    for prompt, seq in wanted:
        assert same_tokens(model, prompt, greedy(model, prompt, 20), out.tokens(seq)) == len(out.tokens(seq)), seq


FAMILIES = [*checkpoints.SERVED, "opt-prenorm", "gpt_neox-sequential"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "layers"), [*((f, "fused") for f in FAMILIES), *((f, "stock") for f in FUSED)])
def test_all_kinds_beside_their_base(bench, family, layers):
    """Two of each kind, a LoRA and the base in one batch, prompts in chunks, rows arriving late, a pool too small for all."""
    base = f"{family}-base"
    if base not in bench.folders:
        bench.family(family, base)
        for kind, config in KINDS.items():
            for number in (1, 2):
                bench.peft(base, f"{family}-{kind}{number}", config(family.split("-")[0]), seed=number)
        bench.lora(base, f"{family}-lora")
    names = [base, f"{family}-lora", *(f"{family}-{kind}{number}" for kind in KINDS for number in (1, 2))]
    wanted = {name: [(p, f"{name}.{i}") for i, p in enumerate(prompts(n, (5, 11)))] for n, name in enumerate(names)}
    requests = [ask(name, *wanted[name][i]) for i in range(2) for name in names]
    made = engine(bench, *names, layers=layers, pages=3 * 3 * 18)
    out = drive(made, {i: [request] for i, request in enumerate(requests)}, BatchingConfig(token_budget=13))
    assert out.preemptions > 0
    check(reference(bench.folders[base]), wanted[base], out)
    for name in names[1:]:
        check(peft_reference(bench, base, name), wanted[name], out)
