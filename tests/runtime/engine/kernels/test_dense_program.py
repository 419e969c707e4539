"""Layers in one call over a dense batch.

Decode steps take this path in every mode, finished rows too, and give what the layers give one by one.
"""

from __future__ import annotations

import pytest
import torch

from runtime.config import DenseConfig, EngineConfig
from runtime.engine.dense.kv_store import DenseKV
from runtime.engine.kernels.program import Program
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.drive import DenseDevice, Drive, Limits, drive
from tests.runtime.engine.test_equality import prompts

pytestmark = needs_kernels
MODES = ("run-to-completion", "pd", "baton", "baton-pd")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many rows each call has."""
    seen: list[int] = []
    run = Program.run_cells

    def counted(self: Program, hidden: torch.Tensor, *given: object) -> object:
        seen.append(hidden.shape[1])
        return run(self, hidden, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Program, "run_cells", counted)
    return seen


def drive_dense(bench, names: list[str], mode: str, padding: str, programs: bool) -> tuple[DenseDevice, Drive]:
    """Run requests of several lengths for each model on a dense engine, with programs or without."""
    config = DenseConfig(mode, 3, padding=padding)  # type: ignore[arg-type]
    engine = DenseDevice(
        bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, kernels="native", dense=config), names
    )
    engine._registry.units.programs._wanted = programs
    requests = []
    for name in names:
        for number, (prompt, count) in enumerate(zip(prompts(len(name), (3, 17, 1, 9)), (12, 4, 9, 7), strict=True)):
            params = SamplingParams(max_tokens=count, ignore_eos=True)
            requests.append(SequenceRequest(f"{name}-{number}", f"{name}-{number}", name, prompt, params))
    return engine, drive(
        engine, {at: [request] for at, request in enumerate(requests)}, Limits(max_num_batched_tokens=64)
    )


def told(out: Drive) -> list[list[tuple[str, int]]]:
    return [[(one.seq, one.token) for one in step.sampled] for step in out.steps]


@pytest.mark.parametrize("padding", ["computed", "skipped"])
@pytest.mark.parametrize("mode", MODES)
def test_a_decode_step_is_one_program(bench, runs, mode, padding):
    name = bench.family("qwen3", "cells-qwen3", num_hidden_layers=3, seed=4)
    ahead, out = drive_dense(bench, [name], mode, padding, True)
    assert len(runs) > len(out.steps) // 2
    runs.clear()
    plain, expected = drive_dense(bench, [name], mode, padding, False)
    assert not runs and told(out) == told(expected) and ahead.idle == plain.idle


def test_adapters_and_several_models(bench, runs):
    """A model and its adapter take the call; two models, each with its own KV store, run layer by layer."""
    base = bench.family("llama", "cells-base", num_hidden_layers=2, seed=9)
    lora = bench.lora(base, "cells-lora")
    for names in ([lora], [base, lora]):
        runs.clear()
        _, out = drive_dense(bench, names, "baton-pd", "skipped", True)
        assert runs
        _, expected = drive_dense(bench, names, "baton-pd", "skipped", False)
        assert told(out) == told(expected)


def test_placeholders_stay_zero(bench, runs, monkeypatch):
    """What a finished row computes in the batch is not stored (BA-04)."""
    seen = 0
    begin = DenseKV.begin

    def looked(self: DenseKV, *given: object) -> object:
        nonlocal seen
        for x in (*self._k, *self._v):
            if x is not None:
                hidden = x[self._places < 0]
                seen += len(hidden)
                assert not hidden.any()
        return begin(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(DenseKV, "begin", looked)
    name = bench.family("llama", "cells-zero", num_hidden_layers=2, seed=4)
    for padding in ("computed", "skipped"):
        engine, _ = drive_dense(bench, [name], "run-to-completion", padding, True)
        assert engine.idle.finished and seen and runs
