"""A staged engine's two lanes: concurrent steps on one pool and one set of weights give what each lane gives alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch

from runtime.chains import Array, Stage, StageResult, StepRunner
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.types import ModelSpec, SamplingParams, StepPlan
from tests.adapters import KINDS
from tests.runtime.engine.carry import Carrier
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.executors.test_stage import CONFIG, length, whole
from tests.runtime.engine.test_equality import prompts

CUDA = pytest.param("cuda", "stock", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))
SAMPLING = SamplingParams(10, ignore_eos=True)
TURNS = 3
MODELS = ["llama", "lora", "lora2", "ia3", "bottleneck"]


@pytest.fixture(scope="module")
def family(bench):
    bench.family("llama", "llama", num_hidden_layers=2, num_key_value_heads=2, seed=1)
    bench.family("llama", "other", num_hidden_layers=1, num_key_value_heads=2, seed=2)
    for seed, name in enumerate(("lora", "lora2")):
        bench.lora("llama", name, seed=seed)
    bench.peft("llama", "ia3", KINDS["ia3"]("llama"))
    bench.bottleneck("llama", "bottleneck")
    return bench


def engine_of(bench, **changes) -> StagedEngine:
    config = replace(CONFIG, **changes)
    return StagedEngine(bench.store, config, half_page(bench.store, config, [*MODELS, "other"]), "d")


@dataclass
class LaneOf:
    """One lane of an engine, used where a test expects an engine."""

    engine: StagedEngine
    runner: StepRunner

    @property
    def page_capacity(self) -> int:
        return self.engine.page_capacity

    def load(self, stage: Stage) -> ModelSpec:
        return self.engine.load(stage)

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        return self.runner.run(plan, inputs)


def lanes(engine: StagedEngine) -> list[Carrier]:
    """Return carriers over the engine's own lane and its second lane, each with its own half of the pages."""
    runners = [engine, engine.second_lane()]
    carriers = [Carrier(LaneOf(engine, runner)) for runner in runners]  # type: ignore[arg-type]
    for number, carrier in enumerate(carriers):
        book = carrier.places[0].book
        for half in (0, 1):
            book.open(f"half {half}", ModelSpec("none", 1, 1, 1 << 30, 1))
            book.extend(f"half {half}", engine.page_capacity // 2)
        book.release(f"half {number}")
    return carriers


class Failing(threading.Thread):
    """A thread; `over` waits for it and raises its error."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._work, self.error = work, None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def over(self) -> None:
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("device", "kernels"), [("cpu", "stock"), pytest.param("cpu", "native", marks=needs_kernels), CUDA]
)
def test_both_lanes_at_once_give_what_each_gives_alone(family, device, kernels):
    """Both lanes run models with adapters of every kind and common stages, in batches mixed anew each step.

    Meanwhile a third thread loads and unloads stages, and reads and writes pages.
    """
    changes = {"device": device, "kernels": kernels}
    engine = engine_of(family, **changes)
    wanted = {}
    for number, name in enumerate(MODELS):
        for at, prompt in enumerate(prompts(number, (3, 17))):
            wanted[name, at] = prompt, whole(family, name, prompt, SAMPLING, **changes).tokens("a")
    for name in MODELS:
        engine.load(Stage(name, 0, length(family, name)))
    stop, told = threading.Event(), []

    def lane(who: str, carrier: Carrier, order: list[str]) -> None:
        for turn in range(TURNS):
            for name in order:
                for at in (0, 1):
                    carrier.add(
                        f"{name}-{at}-{turn}-{who}", name, wanted[name, at][0], SAMPLING, [(0, 0, length(family, name))]
                    )
                carrier.step(5)
            carrier.run(5)
            for seq in list(carrier.seqs):
                name, at, *_ = seq.split("-")
                told.append(((name, int(at)), carrier.seqs[seq].produced))
                carrier.drop(seq)

    def change() -> None:
        page, stage = engine.page_capacity - 1, Stage("other", 0, 2)
        while not stop.wait(0.002):
            engine.load(stage)
            engine.write_pages([page], engine.read_pages([page]))
            engine.unload(stage)

    first, second = lanes(engine)
    changing = Failing(change)
    threads = [Failing(lambda: lane("own", first, MODELS)), Failing(lambda: lane("beside", second, MODELS[::-1]))]
    try:
        for thread in threads:
            thread.over()
    finally:
        stop.set()
    changing.over()
    assert len(told) == 2 * TURNS * len(wanted)
    assert all(tokens == wanted[key][1] for key, tokens in told)


def test_what_is_released_is_forgotten_by_the_lane_that_knows_it(family):
    engine = engine_of(family)
    first, second = lanes(engine)
    stage = Stage("llama", 0, length(family, "llama"))
    for name, carrier in (("a", first), ("b", second)):
        carrier.add(name, "llama", (1, 2, 3), SAMPLING, [(0, stage.lo, stage.hi)])
        carrier.step()
    lane = engine._second_lane
    assert lane._units.programs is not engine._registry.units.programs, "a program holds what it runs with"
    own, others = engine._registry.models[stage.id], lane._models[stage.id]
    assert set(own.sequences) == {"a@0"} and set(others.sequences) == {"b@0"}
    engine.run(StepPlan(9, (), (), ("b@0", "a@0")), {})
    assert not own.sequences and set(others.sequences) == {"b@0"}
    lane.run(StepPlan(10, (), ()), {})
    assert not others.sequences
    lane.run(StepPlan(11, (), (), ("c@0",)), {})
    assert not engine._released.drain_released() and not lane.released.drain_released(), "nothing piles up"
    engine.unload(stage)
    assert not lane._models
