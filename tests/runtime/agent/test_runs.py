"""Whole runs in virtual time: random arrivals, aborts, faults, tiny page pools, models with different pages.

The oracle is the fake engine's own rule for tokens; the fake engine itself refuses any plan that is not consistent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import BatchingConfig
from runtime.engine.fakes.fake import FakeEngine, answer
from runtime.types import SequenceRequest
from tests.runtime.virtual import Virtual, request, spec

MODELS = (
    spec("m", kv_layers=2, page_tokens=4, max_model_len=40, eos_token_ids=(7, 30)),
    spec("n", kv_layers=3, page_tokens=2, max_model_len=30, blocks=("b0", "own")),
    spec("v", kv_layers=2, page_tokens=3, max_model_len=30, virtual_tokens=5),
    spec("o", kv_layers=1, page_tokens=8, max_model_len=40, blocks=("b0", "b1", "head")),
)


@dataclass(frozen=True)
class Load:
    """A run: who arrives when, who is aborted when, which steps fail, on what device."""

    arrivals: tuple[tuple[int, SequenceRequest], ...]
    aborts: tuple[tuple[int, str], ...]
    fail_at: tuple[int, ...]
    pages: int
    config: BatchingConfig

    def play(self, made: Callable[..., FakeEngine] = FakeEngine, **options: bool) -> Virtual:
        engine = made(MODELS, self.pages, alpha=100, beta=10, fail_at=self.fail_at, segments=True, **options)
        virtual = Virtual(engine, self.config)
        for time, one in self.arrivals:
            virtual.arrive(one, time)
        for time, seq in self.aborts:
            virtual.abort(seq, time)
        virtual.run()
        return virtual


@st.composite
def requests(draw: st.DrawFn, seq: str) -> SequenceRequest:
    max_tokens = draw(st.integers(0, 12))
    return request(
        seq,
        draw(st.lists(st.integers(0, 96), min_size=1, max_size=26)),
        draw(st.sampled_from([one.name for one in MODELS])),
        max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, 96), max_size=2))),
        prompt_logprobs=draw(st.sampled_from([None, 0])),
        priority=draw(st.integers(-1, 1)),
        arrival=draw(st.integers(0, 3)),
    )


@st.composite
def loads(draw: st.DrawFn, disturbed: bool = True) -> Load:
    count = draw(st.integers(1, 12))
    times = st.integers(0, 4000)
    arrivals = tuple((draw(times), draw(requests(f"s{index}"))) for index in range(count))
    aborts = (
        tuple((draw(times), f"s{draw(st.integers(0, count - 1))}") for _ in range(draw(st.integers(0, 5))))
        if disturbed
        else ()
    )
    fail_at = tuple(draw(st.lists(st.integers(1, 30), max_size=2))) if disturbed else ()
    config = BatchingConfig(
        max_num_batched_tokens=draw(st.integers(1, 30)),
        max_num_seqs=draw(st.integers(1, 12)),
        watermark=draw(st.sampled_from([0.0, 0.1])),
    )
    return Load(arrivals, aborts, fail_at, draw(st.integers(30, 70)), config)


def fits(virtual: Virtual, one: SequenceRequest) -> bool:
    return len(one.prompt) + min(one.sampling.max_tokens, 1) <= virtual.agent.models[one.model].max_model_len


def check_quiet(virtual: Virtual) -> None:
    """Nothing is left of anybody (page conservation, no leak)."""
    pages = virtual.agent.state().pages
    assert pages.free == pages.capacity
    assert not virtual.agent.busy
    free = pages.capacity
    for event in virtual.trace.events:
        if event.ev in ("kv.alloc", "kv.free"):
            free += event.n if event.ev == "kv.free" else -event.n  # type: ignore[operator]
            assert event.extra["free"] == free >= 0


@settings(max_examples=150, deadline=None)
@given(loads(disturbed=False))
def test_every_sequence_gets_exactly_its_tokens(load: Load) -> None:
    virtual = load.play()
    for _, one in load.arrivals:
        told = virtual.told[one.seq]
        if not fits(virtual, one):
            assert (told.tokens, told.last.finish) == ([], "error")
            continue
        assert told.tokens == answer(virtual.agent.models[one.model], one.prompt, one.sampling)
        assert told.last.finish in ("stop", "length")
        scores = [score for event in told.events for score in event.prompt_logprobs]
        if one.sampling.prompt_logprobs is not None:
            assert tuple(found.token for score in scores for found in score.chosen) == one.prompt[1:]
    check_quiet(virtual)


@settings(max_examples=150, deadline=None)
@given(loads())
def test_aborts_and_faults_cost_nobody_else_a_token(load: Load) -> None:
    virtual = load.play()
    aborted = {seq for _, seq in load.aborts}
    for _, one in load.arrivals:
        told = virtual.told[one.seq]
        expected = answer(virtual.agent.models[one.model], one.prompt, one.sampling)
        if told.last.finish in ("stop", "length"):
            assert told.tokens == expected
        else:
            assert told.tokens == expected[: len(told.tokens)]
            assert (told.last.finish == "abort" and one.seq in aborted) or told.last.finish == "error"
    check_quiet(virtual)


@settings(max_examples=60, deadline=None)
@given(loads())
def test_a_replay_gives_the_same_trace_byte_for_byte(load: Load) -> None:
    first, second = load.play(), load.play()
    assert first.trace.text() == second.trace.text()
    assert first.plans == second.plans


def test_a_crowd_on_a_tiny_device_is_preempted_again_and_again_and_still_right() -> None:
    virtual = Virtual(FakeEngine(MODELS, 30), BatchingConfig(max_num_batched_tokens=16, watermark=0))
    crowd = [
        request(f"s{index}", range(1, 3 + index % 5), MODELS[index % 3].name, max_tokens=18, ignore_eos=True)
        for index in range(40)
    ]
    for index, one in enumerate(crowd):
        virtual.arrive(one, index * 1000)
    virtual.run()
    for one in crowd:
        assert virtual.told[one.seq].tokens == answer(virtual.agent.models[one.model], one.prompt, one.sampling)
    assert virtual.agent.state().counters.preemptions > 20
    check_quiet(virtual)


def test_first_come_first_served_finishes_in_order_under_pressure() -> None:
    virtual = Virtual(FakeEngine([spec()], 8), BatchingConfig(watermark=0))
    for index in range(6):
        virtual.arrive(request(f"s{index}", range(6), max_tokens=9, arrival=index))
    virtual.run()
    assert [event.seq for event in virtual.trace.named("finish")] == [f"s{index}" for index in range(6)]


def test_an_endless_stream_leaves_no_trace_of_itself() -> None:
    """10^4 sequences: what the agent and the engine hold afterwards is what they held at the start."""
    engine = FakeEngine(MODELS, 200)
    virtual = Virtual(engine, BatchingConfig(max_num_batched_tokens=64, max_num_seqs=32), watched=False)
    largest = 0
    for batch in range(100):
        for index in range(100):
            seq = f"s{batch}-{index}"
            virtual.arrive(
                request(seq, range(1, 2 + index % 9), MODELS[index % 3].name, max_tokens=1 + index % 5),
                virtual.now + index,
            )
        virtual.abort(f"s{batch}-50", virtual.now + 2_000_000)
        virtual.run()
        assert len(virtual.told) == 100
        assert all(told.last.finish is not None for told in virtual.told.values())
        largest = max(largest, engine.sequences)
        virtual.told.clear()
        virtual.plans.clear()
        virtual.agent.check()
    assert largest <= 32
    state = virtual.agent.state()
    assert (state.running, state.waiting, state.pages.free) == (0, 0, 200)
    assert sum(state.counters.finished.values()) == 10_000
    sizes = {name: len(value) for name, value in vars(virtual.agent).items() if hasattr(value, "__len__")}
    assert sizes["_roster"] == 0
    assert sizes["_released"] <= 32
