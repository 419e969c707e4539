"""With real models, launching a step before the tokens of the previous one are read does not change any token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.config import EngineConfig
from runtime.engine.executors.stage import launches_ahead
from runtime.engine.recording.graphs import Graphs
from runtime.types import Opened, Row, SamplingParams, SequenceRequest, StepPlan
from tests.runtime.engine.drive import Drive, Limits, PagedDevice, drive
from tests.runtime.engine.gpu_kernel_fakes import Watched, watching

CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4, kernels="stock", async_scheduling="on")
PLAIN = replace(CONFIG, async_scheduling="off")
NAMES = ["base", "tuned", "other"]
EVERYTHING = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, seed=3),
    SamplingParams(max_tokens=11, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(max_tokens=8, temperature=1.1, top_k=9, min_p=0.02, seed=8, frequency_penalty=0.7, logprobs=2),
    SamplingParams(max_tokens=7, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=10, min_tokens=4, logit_bias=((7, 30.0),), stop_token_ids=(7,)),
    SamplingParams(max_tokens=0, prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def family(bench) -> list[str]:
    bench.family("llama", "base", num_hidden_layers=2, seed=1)
    bench.lora("base", "tuned", seed=2)
    bench.family("mistral", "other", seed=4)
    return NAMES


def everything(ignore_eos: bool = True, more: int = 0) -> dict[int, list[SequenceRequest]]:
    """Return requests for every way of sampling with every model, arriving at different steps."""
    made: dict[int, list[SequenceRequest]] = {}
    for i, each in enumerate(EVERYTHING):
        params = replace(each, max_tokens=each.max_tokens + (more if each.max_tokens else 0))
        for n, name in enumerate(NAMES):
            prompt = tuple((7 * i + 3 * n + k) % 60 for k in range(3 + (i + n) % 5))
            seq = f"{name}.{i}"
            made.setdefault((i + n) % 4, []).append(
                SequenceRequest(
                    seq, seq, name, prompt, replace(params, ignore_eos=ignore_eos and not params.stop_token_ids)
                )
            )
    return made


def heard(out: Drive) -> dict[str, list[tuple]]:
    """Return all that was reported of each sequence, except log-probabilities."""

    def words(event):
        scores = [(part.start, [one.token for one in part.chosen]) for part in event.prompt_logprobs]
        return event.index, event.token, event.finish, len(event.top), scores

    return {seq: [words(event) for event in events] for seq, events in out.events.items()}


def numbers(out: Drive) -> list[float]:
    """Return all log-probabilities; their last bits may depend on the batch a row was in."""
    events = [event for seq in sorted(out.events) for event in out.events[seq]]
    own = [
        value for event in events for value in (event.logprob, *(one.logprob for one in event.top)) if value is not None
    ]
    return own + [one.logprob for event in events for part in event.prompt_logprobs for one in part.chosen]


@pytest.mark.parametrize(
    ("where", "credit"), [("run", 3), ("run", 8), ("launched", 3), ("launched", 8), ("recorded", 8)]
)
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_every_way_of_sampling(bench, family, where, credit, ignore_eos):
    """For any stride, and wherever tokens are known first, the events equal those of one token at a time."""
    plain, made = (PagedDevice(bench.store, each, family) for each in (PLAIN, PLAIN if where == "run" else CONFIG))
    if where == "recorded":
        made._graphs = Graphs(Watched(), made._registry.units, made._pool)
        rotaries = made._registry.units.rotaries
        rotaries.update({key: getattr(each, "stock", each) for key, each in rotaries.items()})
    wanted = everything(ignore_eos, more=20 if where == "recorded" else 0)
    expected, got = drive(plain, wanted, Limits(48)), drive(made, wanted, Limits(48), credit=credit)
    assert heard(got) == heard(expected)
    assert numbers(got) == pytest.approx(numbers(expected), abs=1e-4) and len(numbers(got)) > 100
    assert got.awaited > 40 or where == "run"
    if where == "recorded":
        assert made._graphs is not None and made._graphs.replayed > made._graphs.recorded > 0


@settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_schedules_on_few_pages(bench, family, data):
    """Arrivals, stop tokens, length limits, chunks, preemptions: events do not depend on when results are read."""
    arrivals: dict[int, list[SequenceRequest]] = {}
    for i in range(data.draw(st.integers(2, 6))):
        name = data.draw(st.sampled_from(family))
        params = replace(
            data.draw(st.sampled_from(EVERYTHING)),
            stop_token_ids=tuple(data.draw(st.lists(st.integers(0, 60), max_size=9))),
        )
        prompt = tuple(data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=12)))
        arrivals.setdefault(data.draw(st.integers(0, 5)), []).append(
            SequenceRequest(f"s{i}", f"s{i}", name, prompt, params)
        )
    batching = Limits(
        max_num_batched_tokens=data.draw(st.integers(1, 24)), max_num_seqs=data.draw(st.integers(1, 6)), watermark=0.0
    )
    small = replace(CONFIG, kv_cache_memory_bytes=data.draw(st.integers(14, 40)) * 2 * _half(bench, family))
    plain, made = (
        PagedDevice(bench.store, replace(small, async_scheduling=choice), family) for choice in ("off", "on")
    )
    expected, got = (
        drive(plain, arrivals, batching),
        drive(made, arrivals, batching, credit=data.draw(st.integers(1, 9))),
    )
    for seq, events in heard(expected).items():
        assert [each[:3] for each in heard(got)[seq]] == [each[:3] for each in events]
    assert heard(got).keys() == heard(expected).keys()


def _half(bench, family) -> int:
    from runtime.engine.models.registry import half_page

    return half_page(bench.store, CONFIG, family)


def test_launching_neither_waits_nor_copies_but_by_what_does_not_wait(bench, family):
    """A launch reads nothing from the device, which would wait for the previous step; only penalties make it read."""

    def launches(params: SamplingParams, kernels: str = "stock") -> None:
        made = PagedDevice(bench.store, replace(CONFIG, kernels=kernels), ["base"])
        rotaries = made._registry.units.rotaries
        rotaries.update({key: getattr(each, "stock", each) for key, each in rotaries.items()})  # as on a GPU
        model = made.stage("base")
        opened = [SequenceRequest(seq, seq, model, (1, 2, 3), params) for seq in "ab"]
        first = [Row(seq, model, (1, 2, 3), 0, _group(made, k)) for k, seq in enumerate("ab")]
        begun = [made.launch(StepPlan(1, tuple(first), tuple(map(Opened, opened))), {})]
        for step in (2, 3):
            pages = [_group(made, 2 + k) if step == 3 else () for k in range(2)]
            rows = [Row(seq, model, (0,), step + 1, pages[k], True, step - 1, True) for k, seq in enumerate("ab")]
            with watching():
                begun.append(made.launch(StepPlan(step, tuple(rows)), {}))
        assert [len(each.result().result.sampled) for each in begun] == [2, 2, 2]

    launches(SamplingParams(max_tokens=9))
    launches(
        SamplingParams(
            max_tokens=9, temperature=0.8, top_p=0.9, top_k=20, seed=4, logprobs=2, min_tokens=4, logit_bias=((3, 1.0),)
        )
    )
    with pytest.raises(Exception, match="read"):
        launches(SamplingParams(max_tokens=9, frequency_penalty=0.5))


def _group(made: PagedDevice, number: int) -> tuple[tuple[int, ...], ...]:
    (model,) = made.models()
    return (tuple(range(number * model.kv_layers, (number + 1) * model.kv_layers)),)


def test_a_row_cannot_await_what_nobody_sampled(bench, family):
    made = PagedDevice(bench.store, CONFIG, ["base"])
    with pytest.raises(ValueError, match="no step was before"):
        made.launch(StepPlan(1, (Row("a", made.stage("base"), (0,), 3, (), True, 1, True),)), {})


def test_the_switch(bench, family):
    assert [launches_ahead("auto", torch.device(kind)) for kind in ("cpu", "cuda")] == [False, True]
    assert [launches_ahead(choice, torch.device("cuda")) for choice in ("on", "off")] == [True, False]
    assert not PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=1 << 20), ["base"]).ahead
    assert PagedDevice(bench.store, CONFIG, ["base"]).ahead
    with pytest.raises(ValueError, match="async_scheduling must be one of"):
        EngineConfig(async_scheduling="always")


def test_busy_time_is_counted_once(bench, family):
    out = drive(PagedDevice(bench.store, CONFIG, family), everything(), credit=4)
    assert all(step.busy > 0 for step in out.steps)
