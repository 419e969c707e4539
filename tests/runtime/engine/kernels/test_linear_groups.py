"""Adapters packed for the kernels: once per adapter and group when attached, counted as memory, freed when detached."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest

from runtime.config import EngineConfig
from runtime.engine.kernels import linear_groups as groups
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.operands import Low
from runtime.engine.layers.linear import SharedLinear
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.drive import PagedDevice, drive
from tests.runtime.engine.test_equality import ask, prompts
from tests.runtime.engine.test_sharing import fine_tune

pytestmark = needs_kernels

#: Layers that read one input; the kernels multiply each group in one call.
TOGETHER = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Low]]:
    """Record weak references to all adapters that are packed."""
    seen: list[weakref.ref[Low]] = []

    class Watched(Low):
        def __init__(self, kernels, parts) -> None:
            super().__init__(kernels, parts)
            if any(part is not None for part in parts):
                seen.append(weakref.ref(self))

    monkeypatch.setattr(groups, "Low", Watched)
    return seen


def engine(bench, *names: str) -> PagedDevice:
    return PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=8 << 20, page_tokens=4, kernels="native"), names)


def added_in(engine: PagedDevice) -> list[groups.Added]:
    return [added for unit in engine._registry.units.units.values() for added in unit.added]


def run(engine: PagedDevice, *names: str) -> dict[str, list[int]]:
    out = drive(
        engine, {0: [ask(name, prompt, f"{name}-{i}") for name in names for i, prompt in enumerate(prompts(4, (3, 9)))]}
    )
    return {f"{name}-{i}": out.tokens(f"{name}-{i}") for name in names for i in range(2)}


def panels(outputs: int, inputs: int) -> int:
    """Return the bytes of a packed matrix."""
    panel = Kernels().panel
    return -(-outputs // panel) * panel * inputs * 4


def packed_of(engine: PagedDevice, adapter: str) -> Iterator[int]:
    """Yield, per group, the bytes of an adapter's A matrices side by side and of its B matrices."""
    adapter = engine.stage(adapter)
    for unit in engine._registry.units.units.values():
        for paths in TOGETHER:
            layers = [unit.targets[path] for path in paths if path in unit.targets]
            parts = [
                layer.adapters[adapter]
                for layer in layers
                if isinstance(layer, SharedLinear) and adapter in layer.adapters
            ]
            if parts:
                b = sum(panels(*part.b.shape) for part in parts)
                yield panels(sum(part.a.shape[0] for part in parts), parts[0].a.shape[1]) + b


def test_one_copy_whatever_segments_it_runs_in(bench, made):
    """An adapter is packed once, at load, and not again in any segment.

    It runs beside its base, beside a fine-tune that differs from the base in the middle, and alone.
    """
    base = bench.family("llama", "groups-base", num_hidden_layers=3, seed=9)
    every = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    lora, other = bench.lora(base, "groups-a", target_modules=every), bench.lora(base, "groups-b", seed=5, r=7)
    names = (base, fine_tune(bench, base, "groups-tune", 1), lora, other)
    served = engine(bench, *names)
    packed = [nbytes for name in (lora, other) for nbytes in packed_of(served, name)]
    before = served.memory().weights
    assert packed and len(packed) == len(made) and sum(packed) == sum(added.nbytes for added in added_in(served))
    for some in ((lora,), (lora, base), names, (lora, other), names[1:3]):
        run(served, *some)
    assert len(made) == len(packed) and served.memory().weights == before


def test_packed_adapters_are_counted(bench):
    base = bench.family("llama", "groups-counted", num_hidden_layers=2, seed=9)
    lora = bench.lora(base, "groups-counted-a", target_modules=["q_proj", "o_proj", "gate_proj", "down_proj"])
    alone, both = engine(bench, base), engine(bench, base, lora)
    packed = sum(packed_of(both, lora))
    assert packed and both.memory().weights == alone.memory().weights + packed, (
        "a second copy, or one that nobody counts"
    )


def test_a_detached_adapter_is_gone_and_the_others_stay_as_they_are(bench, made):
    base = bench.family("llama", "groups-detached", num_hidden_layers=2, seed=9)
    lora, other = bench.lora(base, "groups-detached-a"), bench.lora(base, "groups-detached-b", seed=5, r=7)
    served = engine(bench, base, other)
    without, stay = served.memory().weights, list(made)
    wanted = run(served, other)
    served.load(lora)
    mine = made[len(stay) :]
    run(served, base, lora, other)
    assert mine and all(each() is not None for each in made) and served.memory().weights > without
    served.unload(lora)
    assert all(each() is None for each in mine), "what was packed of it is still held"
    assert served.memory().weights == without
    assert run(served, other) == wanted and len(made) == len(stay) + len(mine), "another adapter was packed again"
    served.load(lora)
    run(served, lora)
    assert len(made) == len(stay) + 2 * len(mine)


def test_an_adapter_that_does_more_than_add_runs_as_stock_and_back(bench):
    """While a DoRA is on a group its layers run one by one; when it is detached the packed adapters are used again."""
    base = bench.family("llama", "groups-dora", num_hidden_layers=2, seed=9)
    lora, dora = bench.lora(base, "groups-dora-a"), bench.lora(base, "groups-dora-b", seed=5, use_dora=True)
    served = engine(bench, base, lora)
    before, wanted = served.memory().weights, run(served, base, lora)
    served.load(dora)
    beside = run(served, base, lora, dora)
    assert {key: beside[key] for key in wanted} == wanted and beside[f"{dora}-0"] != beside[f"{base}-0"]
    served.unload(dora)
    assert served.memory().weights == before and run(served, base, lora) == wanted
