"""Recorded decode steps of stages give the hidden states and tokens of steps that run module by module, for any cut."""

from __future__ import annotations

import pytest

from runtime.chains import Stage
from runtime.config import EngineConfig
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.engine.recording.graphs import Graphs
from runtime.engine.recording.recorder import StepRecorder
from runtime.types import SamplingParams
from tests.chains import manifest_of
from tests.runtime.engine.carry import Carrier
from tests.runtime.engine.gpu_kernel_fakes import Refusing, Watched
from tests.runtime.engine.test_equality import prompts

NAMES = ["base", "tuned", "neox"]
HUGE = 0x7F


@pytest.fixture(scope="module")
def family(bench):
    bench.family("llama", "base", num_hidden_layers=3, num_key_value_heads=2, seed=1)
    bench.lora("base", "tuned", seed=2)
    bench.family("gpt_neox", "neox", num_hidden_layers=2, seed=4)
    return bench


def engines(bench, count: int, recorder: type[StepRecorder] | None = None, **changes) -> list[StagedEngine]:
    config = EngineConfig(kv_cache_memory_bytes=2 << 20, page_tokens=4, kernels="stock", **changes)
    half = half_page(bench.store, config, NAMES)
    made = [StagedEngine(bench.store, config, half, f"d{number}") for number in range(count)]
    for engine in made if recorder is not None else ():
        engine._graphs = Graphs(recorder(), engine._registry.units, engine._pool)
        for half_pool in (engine._pool._k, engine._pool._v):
            half_pool[engine._pool.spill] = HUGE
    return made


def as_on_a_gpu(*made: StagedEngine) -> None:
    for engine in made:
        rotaries = engine._registry.units.rotaries
        rotaries.update({key: getattr(each, "stock", each) for key, each in rotaries.items()})


def cut(bench, name: str, at: int, first: int = 0) -> list[tuple[int, int, int]]:
    return [(first, 0, at), (1 - first, at, len(manifest_of(bench.store, name).components))]


def played(bench, made: list[StagedEngine], count: int = 14, **params) -> Carrier:
    """Run every model, cut in two ways and whole; some sequences go from the first engine to the second, some back.

    Their lengths differ.
    """
    carrier = Carrier(*made)
    for number, name in enumerate(NAMES):
        end = len(manifest_of(bench.store, name).components)
        paths = [cut(bench, name, 2), cut(bench, name, 3, 1), [(0, 0, end)]]
        for index, prompt in enumerate(prompts(number, (5, 11, 3))):
            sampling = SamplingParams(count + 4 * index, ignore_eos=True, **params)
            carrier.add(f"{name}{index}", name, prompt, sampling, paths[index])
    as_on_a_gpu(*made)
    carrier.run(6)
    return carrier


def produced(carrier: Carrier) -> dict[str, list[int]]:
    return {seq: one.produced for seq, one in carrier.seqs.items()}


@pytest.mark.parametrize("params", [{}, dict(temperature=0.9, top_p=0.8, seed=5, frequency_penalty=0.4, logprobs=2)])
def test_tokens_are_those_of_steps_that_run_their_modules(family, params):
    plain, made = engines(family, 2), engines(family, 2, Watched)
    assert produced(played(family, made, **params)) == produced(played(family, plain, **params))
    for engine in made:
        graphs = engine._graphs
        assert graphs is not None and graphs.refused == 0
        assert 0 < graphs.recorded < graphs.replayed
        assert not engine._pool._k[engine._pool.padding].any(), "the page that pads tables stays zero"


def test_what_is_handed_on_is_not_written_over_by_the_next_step(family):
    """Hidden states of one replay are unchanged after the next."""
    (engine,) = engines(family, 1, Watched)
    carrier = Carrier(engine)
    carrier.add("a", "base", (1, 2, 3), SamplingParams(20, ignore_eos=True), cut_here(family, "base", 3))
    as_on_a_gpu(engine)
    kept: list[tuple[bytes, memoryview]] = []
    run = engine.run

    def watched(plan, inputs):
        result = run(plan, inputs)
        kept.extend((bytes(array.data), array.data) for array in result.outputs.values())
        return result

    engine.run = watched  # type: ignore[method-assign]
    carrier.run()
    assert engine._graphs is not None and engine._graphs.replayed > 4
    assert len({then for then, _ in kept}) > 10
    assert all(bytes(now) == then for then, now in kept)


def cut_here(bench, name: str, at: int) -> list[tuple[int, int, int]]:
    return [(0, 0, at), (0, at, len(manifest_of(bench.store, name).components))]


def test_loading_and_unloading_drop_what_was_recorded(family):
    (engine,) = engines(family, 1, Watched)
    carrier = Carrier(engine)
    carrier.add("a", "base", (1, 2, 3), SamplingParams(12, ignore_eos=True), cut_here(family, "base", 3))
    as_on_a_gpu(engine)
    carrier.run()
    assert engine._graphs is not None and len(engine._graphs) > 0
    engine.load(Stage("base", 0, 3))
    assert len(engine._graphs) > 0, "it was there"
    engine.load(Stage("tuned", 0, 3))
    assert len(engine._graphs) == 0


def test_what_cannot_be_recorded_runs_as_it_is(family):
    plain, made = engines(family, 2), engines(family, 2, Refusing)
    assert produced(played(family, made)) == produced(played(family, plain))
    assert all(engine._graphs is not None and engine._graphs.refused > 0 == engine._graphs.replayed for engine in made)


def test_the_switch(family):
    assert engines(family, 1)[0]._graphs is None, "auto, on a CPU"
    assert isinstance(engines(family, 1, graphs="on")[0]._graphs, Graphs)
    assert engines(family, 1, graphs="on", trace_segments=True)[0]._graphs is None, "a trace tells which modules ran"
