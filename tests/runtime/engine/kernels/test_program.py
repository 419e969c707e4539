"""Layers in one call: steps use it, with prompts and adapters too, and give what the layers give one by one.

What the program cannot do runs module by module.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime.config import EngineConfig
from runtime.engine.kernels.program import Program, program_of
from runtime.engine.step.batch import adapter_spans
from runtime.engine.step.context import ForwardContext, running
from surgery.modules.components import Where
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.test_equality import ask, prompts
from tests.runtime.engine.test_sharing import fine_tune

pytestmark = needs_kernels
MLP = ["gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many half layers each call runs."""
    seen: list[int] = []
    run = Program.run

    def counted(self: Program, *given: object) -> object:
        seen.append(len(self._steps))
        return run(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Program, "run", counted)
    return seen


def both(bench, names: list[str], **config: object) -> list[dict[str, list[tuple[int | None, float | None]]]]:
    """Return the answers of one engine with programs and of one without, all models in one batch: tokens with their
    log-probabilities.
    """
    answers = []
    for wanted in (True, False):
        engine = PagedDevice(
            bench.store, EngineConfig(kv_cache_memory_bytes=8 << 20, page_tokens=4, kernels="native", **config), names
        )  # type: ignore[arg-type]
        engine._registry.units.programs._wanted = wanted
        requests = [
            ask(name, prompt, f"{name}-{i}", logprobs=1)
            for name in names
            for i, prompt in enumerate(prompts(len(name), (3, 17, 5)))  # the last begins beside a longer one
        ]
        out = drive(
            engine, {2 * at: [request] for at, request in enumerate(requests)}, Limits(max_num_batched_tokens=24)
        )
        answers.append(
            {each.seq: [(event.token, event.logprob) for event in out.events[each.seq]] for each in requests}
        )
    return answers


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_step_is_one_call(bench, runs, family):
    name = bench.family(family, f"program-{family}", num_hidden_layers=3, seed=4)
    ahead, one_by_one = both(bench, [name])
    assert ahead == one_by_one
    assert set(runs) == {5, 6}, "three layers of two halves each; with prompts all but the last half"


def test_models_that_share_layers_and_adapters(bench, runs):
    base = bench.family("llama", "program-base", num_hidden_layers=3, seed=9)
    names = [
        base,
        fine_tune(bench, base, "program-tune", 1),
        bench.lora(base, "program-lora"),
        bench.lora(base, "program-other", seed=5),
    ]
    ahead, one_by_one = both(bench, names)
    assert ahead == one_by_one
    assert set(runs) >= {2}, "a shared layer, a private one, and shared ones behind it"
    assert ahead["program-lora-0"] != ahead[f"{base}-0"]


@pytest.mark.parametrize("targets", [MLP, ["q_proj", "o_proj", *MLP]], ids=["mlp", "both halves"])
def test_adapters_on_gate_and_up(bench, runs, targets):
    base = bench.family("llama", f"program-gate-{len(targets)}", num_hidden_layers=2, seed=9, intermediate_size=100)
    names = [
        base,
        bench.lora(base, f"{base}-a", target_modules=targets),
        bench.lora(base, f"{base}-b", seed=5, r=7, target_modules=targets),
    ]
    ahead, one_by_one = both(bench, names)
    assert ahead == one_by_one
    assert set(runs) == {3, 4} and ahead[f"{names[1]}-0"] != ahead[f"{base}-0"]


@pytest.mark.parametrize("targets", [MLP, ["down_proj"], ["up_proj"]], ids="+".join)
def test_an_ffn_with_adapters_gives_each_row_the_same_bits_in_any_company(bench, targets):
    """Equal to stock within rounding; bit for bit the same alone and in a batch, in a program and without one.

    The FFN width fills no panel.
    """
    base = bench.family("llama", f"program-ffn-{'-'.join(targets)}", num_hidden_layers=1, seed=9, intermediate_size=100)
    a, b = (
        bench.lora(base, f"{base}-a", target_modules=targets),
        bench.lora(base, f"{base}-b", seed=5, r=7, target_modules=targets),
    )
    engines = [
        PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=1 << 20, kernels=k), [base, a, b])
        for k in ("native", "stock")
    ]  # type: ignore[arg-type]
    native, stock = (
        next(unit.module for unit in each._registry.units.units.values() if unit.kind == "ffn") for each in engines
    )
    a, b = map(engines[0].stage, (a, b))
    users = [None, a, a, None, b, None, a]
    hidden = torch.randn(1, len(users), 64, generator=torch.Generator().manual_seed(1)) * 3

    def frame(rows: range) -> ForwardContext:
        return ForwardContext(
            torch.zeros(1, len(rows)), (), adapter_spans([users[row] for row in rows], [1] * len(rows))
        )

    def run(module: nn.Module, rows: range) -> torch.Tensor:
        with torch.inference_mode(), running(given := frame(rows)):
            return module(hidden[:, rows.start : rows.stop], Where(given.positions, None))

    program = program_of([native])
    assert program is not None
    everybody = range(len(users))
    together = run(native, everybody)
    torch.testing.assert_close(together, run(stock, everybody), rtol=1e-5, atol=1e-5)
    assert torch.equal(program.run(hidden, frame(everybody), None, [None], None), together)
    plain = program.run(hidden, ForwardContext(torch.zeros(1, len(users)), ()), None, [None], None)
    for row in everybody:
        alone = range(row, row + 1)
        assert torch.equal(run(native, alone), together[:, row : row + 1])
        assert torch.equal(
            program.run(hidden[:, row : row + 1], frame(alone), None, [None], None), together[:, row : row + 1]
        )
        assert torch.equal(plain[:, row], together[:, row]) == (users[row] is None)


def test_stock_layers_are_left_alone(bench, runs):
    name = bench.family("llama", "program-stock", num_hidden_layers=2, seed=4)
    both(bench, [name], layers="stock")
    assert not runs


def test_heads_too_wide_for_the_kernels_attend_elsewhere(bench, runs, monkeypatch):
    """The limits come from a thread's stack: a model beyond them runs torch's attention."""
    from runtime.engine.kernels import paged_attention as paged
    from runtime.engine.kernels import program

    name = bench.family("llama", "program-wide", num_hidden_layers=2, seed=4)
    ahead, _ = both(bench, [name])
    for module in (paged, program):
        monkeypatch.setattr(module, "MOST_WIDTH", 4)
    runs.clear()
    wide, _ = both(bench, [name])
    assert not runs
    assert {seq: [token for token, _ in one] for seq, one in wide.items()} == {
        seq: [token for token, _ in one] for seq, one in ahead.items()
    }
