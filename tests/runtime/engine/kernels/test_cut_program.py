"""Layers in one call where other devices hold pages of some: cut there, with the same bits, else in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from runtime.config import EngineConfig
from runtime.engine.attention.interface import Tokens
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.models.components import ComponentPool
from runtime.engine.step.context import AttentionBackend, AwayRow, PagedMetadata
from runtime.engine.step.decode_reuse import DecodeReuse
from runtime.types import SentAway
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.conftest import Bench
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.test_equality import ask, prompts

pytestmark = needs_kernels
LAYERS = 4


class Elsewhere:
    """Attention of a paging of which another device holds layers, with all pages here nevertheless."""

    def __init__(self, here: AttentionBackend, layers: list[tuple[int, int]], asked: list[int]) -> None:
        self._here, self.asked = here, asked
        loans = tuple(SentAway("s", "d1", at, 0, 4, each) for at, each in enumerate(layers))
        self.paging: PagedMetadata = replace(here.paging, away=(AwayRow(0, 0, loans),))

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._here.write_kv(layer, key, value)

    def decode(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        self.asked.append(layer)
        self._here.decode(layer, now, out, sums)

    def chunks(self, layer: int, now: Tokens, out: Tensor, sums: Tensor | None = None) -> None:
        self._here.chunks(layer, now, out, sums)


def answers(bench: Bench, names: list[str]) -> dict[str, list[tuple[int | None, float | None]]]:
    config = EngineConfig(kv_cache_memory_bytes=8 << 20, page_tokens=4, kernels="native")
    requests = [
        ask(name, prompt, f"{name}-{i}", logprobs=2)
        for name in names
        for i, prompt in enumerate(prompts(len(name), (3, 17)))
    ]
    out = drive(PagedDevice(bench.store, config, names), {0: requests}, Limits(max_num_batched_tokens=24))
    return {each.seq: [(event.token, event.logprob) for event in out.events[each.seq]] for each in requests}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def names(request: pytest.FixtureRequest, bench: Bench) -> list[str]:
    base = bench.family("qwen3", f"cut-{request.param}", num_hidden_layers=LAYERS, seed=9, dtype=request.param)
    return [base, bench.lora(base, f"{base}-lora")]


@pytest.mark.parametrize("layers", [[(0, 1)], [(1, 3)], [(0, 2), (3, 4)], [(3, 9)], [(0, 9)]], ids=str)
def test_a_step_is_cut_at_the_layers_that_are_elsewhere(
    bench: Bench, names: list[str], layers: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecodeReuse, "remember_step", lambda *given: None)
    calls: list[tuple[bool, bool]] = []
    run = Kernels.layers_

    def counted(self: Kernels, hidden: Tensor, halves: Any, *given: Any, **how: bool) -> int | None:
        left = run(self, hidden, halves, *given, **how)
        calls.append((how.get("resumes", False), left is not None))
        return left

    monkeypatch.setattr(Kernels, "layers_", counted)
    plain, whole = answers(bench, names), len(calls)
    assert set(calls) == {(False, False)}

    calls.clear()
    attend, asked = ComponentPool.attend, list[int]()
    monkeypatch.setattr(ComponentPool, "attend", lambda self, paging: Elsewhere(attend(self, paging), layers, asked))
    assert answers(bench, names) == plain, "tokens and log-probabilities"
    cut = [layer for layer in range(LAYERS) if any(lo <= layer < hi for lo, hi in layers)]
    assert asked == cut * whole
    assert len(calls) == (len(cut) + 1) * whole
    one = [(at > 0, at < len(cut)) for at in range(len(cut) + 1)]
    assert calls == one * whole
