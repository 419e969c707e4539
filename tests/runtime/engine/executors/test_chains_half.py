"""Chains of several models in half precision: tokens may differ from the reference only at ties within rounding."""

from __future__ import annotations

import torch

from tests.runtime.engine.catalog.test_describe import ask
from tests.runtime.engine.chain_family import COUNT, add_family, agreeing
from tests.runtime.engine.drive import Limits, drive
from tests.runtime.engine.test_equality import engine, prompts


def test_bfloat16_with_their_parents_in_one_engine(bench):
    names = add_family(bench, "bfloat16")
    wanted = {name: [(f"{name}.{i}", p) for i, p in enumerate(prompts(n, (4, 11)))] for n, name in enumerate(names)}
    requests = [ask(name, p, seq) for i in range(2) for name in names for seq, p in [wanted[name][i]]]
    out = drive(engine(bench, *names), {i // 5: requests[i : i + 5] for i in range(0, len(requests), 5)}, Limits(40))
    agreed = sum(agreeing(bench, name, wanted[name], out, torch.bfloat16) for name in names)
    assert agreed > COUNT * len(names), "hardly a token agrees"
