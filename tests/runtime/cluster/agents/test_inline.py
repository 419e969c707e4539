"""A cluster of one device on the scheduler's thread gives the same answers, and ends requests properly on faults."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from runtime.chains import Array, StageResult
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agents.inline import InlineAgent
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import ClusterConfig
from runtime.control.scheduler_io import ServeModel
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.types import BACKGROUND, EngineLost, ModelSpec, SamplingParams, SequenceRequest, StepPlan
from tests.runtime.cluster.clusters import CUTS, LIMIT, MODELS, Load, answered, blocks, eventually, request, verify
from tests.runtime.cluster.whole import WholeEngine, answer, inline
from zoo.errors import InUse, NotFound, NotServable, Unavailable


def alone(
    make: Callable[[], IntegerEngine] = lambda: IntegerEngine(MODELS, 400),
    log: Callable[[bytes], object] | None = None,
    **config: Any,
) -> ClusterDriver:
    chains = [model.chain(*CUTS) for model in MODELS]
    only = InlineAgent(make, settings=AgentSettings(report_seconds=0.05))
    return ClusterDriver(chains, blocks(), [only.device], only, ClusterConfig(**config), log=log)


def test_tokens_are_the_models_own_and_pages_come_back() -> None:
    with alone() as driver:
        with Load(driver) as load:
            assert eventually(lambda: load.done > 20)
        assert not load.wrong, load.wrong
        state = driver.state()
        assert state.running == state.waiting == 0 and state.pages.free == state.pages.capacity
        assert driver.health()["status"] == "ok" and driver.agents()[0].phase == "up"
        assert eventually(lambda: driver.view.reports()["agent-0"].steps > 20)
        with pytest.raises(NotServable):
            driver.load("org/other")


def test_a_step_that_fails_ends_its_own_sequences_only() -> None:
    with alone(lambda: IntegerEngine(MODELS, 400, fail_at=(3,))) as driver:
        one, two = request("one", range(1, 9)), request("two", range(2, 12))
        assert answered(driver, [one])["one"][-1].finish == "error"
        verify(two, answered(driver, [two])["two"])


class _Arriving(IntegerEngine):
    """An engine during whose tenth step `arrive` is called; the rows of later steps are kept."""

    def __init__(self) -> None:
        super().__init__(MODELS, 400)
        self.arrive: Callable[[], None] | None = None
        self.later: list[list[str]] = []

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        if self.later or plan.step > 10:
            self.later.append([row.seq for row in plan.rows])
        elif plan.step == 10 and self.arrive is not None:
            self.arrive()
        return super().run(plan, inputs)


def test_a_request_that_comes_during_a_step_of_lines_has_the_next_one_for_itself() -> None:
    """Requests are handled before the rows that return, whose next ones would be on their way else."""
    engine = _Arriving()
    only = InlineAgent(lambda: engine, settings=AgentSettings())
    chains, config = [model.chain(*CUTS) for model in MODELS], ClusterConfig(background_share=0.01)
    with ClusterDriver(chains, blocks(), [only.device], only, config) as driver:
        lines = [replace(request(f"line{at}", range(1, 5), max_tokens=40), priority=BACKGROUND) for at in range(4)]
        answers: list[Any] = []
        engine.arrive = lambda: answers.append(driver.run([request("now", range(2, 6), max_tokens=4)]))
        told = answered(driver, lines)
        assert [event.index for event in answers[0]] == [0, 1, 2, 3]
    assert all(len(told[line.seq]) == 40 for line in lines)
    assert [seq.split("#")[0] for seq in engine.later[0]] == ["now"]


class _Lost(IntegerEngine):
    """An engine that is lost on its third step."""

    def run(self, plan: StepPlan, inputs: dict[str, Array]) -> StageResult:  # type: ignore[override]
        if plan.step == 3:
            raise EngineLost("the device has gone")
        return super().run(plan, inputs)


def test_an_engine_that_is_lost_is_the_end_and_says_why() -> None:
    with alone(lambda: _Lost(MODELS, 400)) as driver:
        events = answered(driver, [request("one", range(1, 9))])["one"]
        assert events[-1].finish == "error" and "the device has gone" in (events[-1].error or "")
        assert eventually(lambda: not driver.alive) and "the device has gone" in (driver.death or "")
        with pytest.raises(Unavailable):
            driver.run([request("two", range(1, 9))])


def test_where_no_model_is_served_an_engine_that_is_not_made_again_is_the_end_too() -> None:
    made: list[IntegerEngine] = []

    def make() -> IntegerEngine:
        if made:
            raise EngineLost("no such device")
        made.append(IntegerEngine(MODELS, 400))
        return made[-1]

    only = InlineAgent(make)
    with ClusterDriver([], [], [only.device], only, ClusterConfig()) as driver:
        assert not driver.restart(only.device, LIMIT)
        assert not driver.alive and "no such device" in (driver.death or "")


def test_an_engine_that_cannot_be_made_is_told_at_once() -> None:
    def make() -> IntegerEngine:
        raise EngineLost("no such device")

    with pytest.raises(Unavailable, match="no such device"):
        alone(make)


def test_another_engine_takes_over_and_nothing_is_lost() -> None:
    made: list[IntegerEngine] = []

    def make() -> IntegerEngine:
        made.append(IntegerEngine(MODELS, 400))
        return made[-1]

    with alone(make) as driver:
        with Load(driver, clients=2) as load:
            assert eventually(lambda: load.done > 3) and driver.roll(LIMIT)
            after = load.done
            assert eventually(lambda: load.done > after + 3)
        assert not load.wrong, load.wrong
        assert len(made) == 2 and driver.agents()[0].incarnation == 2


def test_requests_and_aborts_come_while_a_step_runs() -> None:
    """No caller waits for the engine."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(IntegerEngine):
        def run(self, plan: StepPlan, inputs: dict[str, Array]) -> StageResult:  # type: ignore[override]
            inside.set()
            assert go_on.wait(LIMIT)
            return super().run(plan, inputs)

    with alone(lambda: Slow(MODELS, 400)) as driver:
        try:
            first = driver.run([request("one", range(1, 9), max_tokens=300)])
            assert inside.wait(LIMIT)
            second = driver.run([request("two", range(1, 9), max_tokens=3)])
            driver.abort(["one"])
            assert driver.state().running + driver.state().waiting <= 2
        finally:
            go_on.set()
        assert _ends(first) == "abort" and _ends(second) == "length"


def test_many_that_come_at_once_are_told_in_lots_that_a_log_takes() -> None:
    lines: list[bytes] = []
    asked = [request(f"s{number}", [7] * 512, "org/nobody") for number in range(5000)]
    with alone(log=lines.append) as driver:
        told = answered(driver, asked)
    assert all([event.finish for event in told[one.seq]] == ["error"] for one in asked)
    events = [json.loads(line) for line in lines[1:] if b"AddRequests" in line[:60]]
    lots = [[len(one["prompt"]) for one in event["requests"]] for _, _, event, _ in events]
    assert sum(map(len, lots)) == 5000 and max(map(sum, lots)) <= 1 << 20


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_request_is_announced_where_lines_of_batches_have_a_share_of_their_own(share: float) -> None:
    lines: list[bytes] = []
    with alone(log=lines.append, background_share=share) as driver:
        driver.expect_request("r-one")
        driver.expect_request("r-two", comes=False)
        answered(driver, [request("one", range(1, 9))])
    events = [json.loads(line)[2] for line in lines[1:] if b"ExpectRequest" in line]
    told = [{"request": "r-one", "comes": True}, {"request": "r-two", "comes": False}]
    assert events == (told if share else [])
    driver.expect_request("r-three")
    assert driver._scheduler_loop.idle, "nothing is kept for a loop that has ended"


def test_a_model_that_is_unloaded_waits_for_who_runs_on_it_and_takes_requests_again_where_that_takes_too_long() -> None:
    engine = WholeEngine([_model("m"), _model("n")], 200, pace=lambda _: time.sleep(0.002))
    with inline(engine) as driver:
        sampling = SamplingParams(max_tokens=100, ignore_eos=True)
        events = driver.run([SequenceRequest("one", "one", "m", (5, 6), sampling)])
        first = next(events)
        with pytest.raises(InUse, match="still run"):
            driver.unload("m", timeout=0.02)
        assert {spec.name for spec in driver.models()} == {"m", "n"}
        ended: list[float] = []
        reader = threading.Thread(target=lambda: ended.extend([len([first, *events]), time.monotonic()]))
        reader.start()
        driver.unload("m")
        gone = time.monotonic()
        reader.join(LIMIT)
        assert ended[0] == 100 and ended[1] <= gone + 1
        assert eventually(lambda: [spec.name for spec in engine.models()] == ["n"]), "the engine never let go of it"
        assert answered(driver, [SequenceRequest("two", "two", "m", (5,), sampling)])["two"][-1].finish == "error"
        assert driver.load("m").name == "m"
        assert len(answered(driver, [SequenceRequest("three", "three", "m", (5, 6), sampling)])["three"]) == 100


def test_a_model_that_could_neither_be_unloaded_in_time_nor_come_back_is_said_to_be_gone() -> None:
    """The store has lost the model meanwhile: the error names both reasons, and the model is not listed any more."""
    engine = WholeEngine([_model("m"), _model("n")], 200, pace=lambda _: time.sleep(0.002))
    with inline(engine) as driver:
        events = driver.run(
            [SequenceRequest("one", "one", "m", (5, 6), SamplingParams(max_tokens=100, ignore_eos=True))]
        )
        first = next(events)

        def lost(name: str) -> ServeModel:
            raise NotFound(f"{name} is not in the store")

        driver._describe = lost
        with pytest.raises(InUse, match=r"still run after 0\.02 s; .* m is not in the store"):
            driver.unload("m", timeout=0.02)
        assert [spec.name for spec in driver.models()] == ["n"]
        assert len([first, *events]) == 100, "whoever runs finishes"


def test_prompts_take_what_decodes_leave_of_a_step_and_keep_all_their_scores() -> None:
    """With a budget of 16, a prompt of 100 tokens runs in chunks, and delays none of three decodes."""
    steps: list[list[tuple[str, int]]] = []

    class Watched(WholeEngine):
        def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
            if plan.rows:
                steps.append([(row.seq.split("#")[0], len(row.tokens)) for row in plan.rows])
            return super().run(plan, inputs)

    spec = _model("m")
    engine = Watched([spec], 200, pace=lambda _: time.sleep(0.002))
    prompt = tuple(number % 90 for number in range(100))
    with inline(engine, max_num_batched_tokens=16) as driver:
        short = [
            SequenceRequest(f"s{number}", "s", "m", (number,), SamplingParams(80, ignore_eos=True))
            for number in range(3)
        ]
        running = driver.run(short)
        seen = [next(running) for _ in range(6)]
        long = SequenceRequest("long", "l", "m", prompt, SamplingParams(4, ignore_eos=True, prompt_logprobs=2))
        told = answered(driver, [long])["long"]
        seen += running
    assert [event.token for event in told] == answer(spec, prompt, long.sampling)
    scores = [one.token for part in told[0].prompt_logprobs for one in part.chosen]
    assert scores == list(prompt[1:]) and [part.start for part in told[0].prompt_logprobs][:2] == [1, 13]
    for one in short:
        assert [event.token for event in seen if event.seq == one.seq] == answer(spec, one.prompt, one.sampling)
    prefill = [dict(step) for step in steps if dict(step).get("long", 0) > 1]
    assert len(prefill) == 8 and all(sum(step.values()) <= 16 for step in prefill)
    assert all({"s0", "s1", "s2"} < step.keys() for step in prefill), "a decode waited for a prompt"


def _model(name: str) -> ModelSpec:
    return ModelSpec(name, 2, 16, 256, 320, eos_token_ids=(), blocks=("shared", f"own-{name}"))


def _ends(events: Sequence[object] | object) -> str | None:
    return [event.finish for event in events][-1]  # type: ignore[attr-defined]


class _Preparing(IntegerEngine):
    """An engine with work to do ahead of steps, in parts; it counts them, and those done while sequences ran."""

    parts, while_busy, running = 5, 0, 0

    def prepare_next(self) -> bool:
        self.while_busy += self.running > 0
        self.parts -= self.parts > 0
        return self.parts > 0

    def run(self, plan: StepPlan, inputs: dict[str, Array]) -> StageResult:  # type: ignore[override]
        self.running += len(plan.opened) - len(plan.released)
        return super().run(plan, inputs)


def test_an_engine_prepares_while_it_is_idle() -> None:
    engine = _Preparing(MODELS, 400)
    with alone(lambda: engine) as driver:
        assert eventually(lambda: engine.parts == 0)
        asked = request("one", range(1, 9))
        verify(asked, answered(driver, [asked])["one"])
    assert engine.while_busy == 0
