"""Recorded decode steps give the tokens of steps that run module by module.

Covered: padded batches, replay on new rows, recordings that are dropped and made again.
"""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import EngineConfig
from runtime.engine.adapters.stack_cache import StackCache
from runtime.engine.attention.varlen import varlen_attention
from runtime.engine.recording.graphs import Graphs, bucket, graphs_for, table_width
from runtime.engine.recording.recorder import StepRecorder
from runtime.engine.step.context import AdapterSpan, ForwardContext
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.engine.chain_family import add_family
from tests.runtime.engine.drive import Drive, Limits, PagedDevice, drive
from tests.runtime.engine.gpu_kernel_fakes import PlainVarlen, Refusing, Watched
from tests.runtime.engine.test_equality import prompts

ADAPTED = ["base", "tuned", "tuned2", "ia3", "bottleneck", "other"]
HUGE = 0x7F
CONFIG = EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, kernels="stock", graphs="off")


@pytest.fixture(scope="module")
def family(bench) -> list[str]:
    bench.family("llama", "base", num_hidden_layers=2, seed=1)
    bench.lora("base", "tuned", seed=2)
    bench.lora("base", "tuned2", seed=3, r=3, target_modules=["q_proj", "down_proj", "lm_head"])
    targets = dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    bench.peft("base", "ia3", peft.IA3Config(task_type="CAUSAL_LM", **targets))
    bench.bottleneck("base", "bottleneck")
    bench.family("mistral", "other", seed=4)
    bench.peft("base", "prompt", peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    return [*ADAPTED, "prompt"]


def recorded(made: PagedDevice, recorder: StepRecorder, **options) -> Graphs:
    """Make an engine record its decode steps, with huge values in the spill page, which no token may read."""
    for half in (made._pool._k, made._pool._v):
        half[made._pool.spill] = HUGE
    rotaries = made._registry.units.rotaries
    rotaries.update(
        {key: getattr(each, "stock", each) for key, each in rotaries.items()}
    )  # as on a GPU; on a CPU the tables need the largest position
    made._graphs = Graphs(recorder, made._registry.units, made._pool, **options)
    return made._graphs


def arrivals(names: list[str], count: int = 14, **params) -> dict[int, list[SequenceRequest]]:
    """Three requests per model, at different steps and of different lengths, so that batches grow and shrink."""
    made: dict[int, list[SequenceRequest]] = {}
    for i, (name, prompt) in enumerate(
        (name, prompt) for n, name in enumerate(names) for prompt in prompts(n, (5, 11, 3))
    ):
        sampling = SamplingParams(max_tokens=count + 5 * (i % 3), ignore_eos=True, **params)
        made.setdefault(2 * (i % 4), []).append(SequenceRequest(f"{name}.{i}", f"{name}.{i}", name, prompt, sampling))
    return made


def tokens(out: Drive) -> dict[str, list[int]]:
    return {seq: out.tokens(seq) for seq in out.events}


@pytest.mark.parametrize("attention", ["gathered", "varlen"])
@pytest.mark.parametrize("kernels", ["stock", "auto"])
@pytest.mark.parametrize("names", [["base"], ["base", "other"], ["tuned", "tuned2"], ADAPTED])
def test_tokens_are_those_of_steps_that_run_their_modules(bench, family, names, kernels, attention):
    config = replace(CONFIG, kernels=kernels)
    plain, made = PagedDevice(bench.store, config, names), PagedDevice(bench.store, config, names)
    if attention == "varlen":
        made._registry.units.attention = varlen_attention(PlainVarlen(ends=True).kernel)
    graphs = recorded(made, Watched())
    expected, got = (drive(engine, arrivals(names), Limits(64)) for engine in (plain, made))
    assert tokens(got) == tokens(expected)
    assert graphs.refused == 0
    assert 0 < graphs.recorded < graphs.replayed
    padding, spill = (made._pool._k[page] for page in (made._pool.padding, made._pool.spill))
    assert not padding.any(), "the page that pads tables stays zero"
    assert (spill == HUGE).any() and not (spill == HUGE).all(), "rows of nobody were there, and nobody read it"


@pytest.mark.parametrize("attention", ["gathered", "varlen"])
def test_chains_whose_pages_and_depths_differ(bench, attention):
    add_family(bench)
    names = ["narrow", "stitched", "pruned", "shifted", "repeated and stitched", "with several adapters"]
    plain, made = (PagedDevice(bench.store, CONFIG, names) for _ in range(2))
    assert len({spec.page_tokens for spec in made.models()}) > 1
    if attention == "varlen":
        made._registry.units.attention = varlen_attention(PlainVarlen().kernel)
    graphs = recorded(made, Watched())
    expected, got = (drive(engine, arrivals(names), Limits(200)) for engine in (plain, made))
    assert tokens(got) == tokens(expected)
    assert graphs.refused == 0
    assert 0 < graphs.recorded < graphs.replayed


def test_models_that_differ_in_adapters_share_their_recordings(bench, family):
    """Whatever models the rows of a step are of, the number of rows decides which recording runs."""
    bench.lora("base", "biased", seed=6, lora_bias=True)
    names = ["base", "tuned", "tuned2", "ia3", "bottleneck", "biased"]
    plain, made = (PagedDevice(bench.store, CONFIG, names) for _ in range(2))
    graphs = recorded(made, Watched())
    expected, got = (drive(engine, arrivals(names), Limits(64)) for engine in (plain, made))
    assert tokens(got) == tokens(expected)
    rows = {shape[0][0][1] for shape in graphs._recordings}
    assert all(len(shape[0]) == 1 for shape in graphs._recordings) and max(rows) > 8
    assert graphs.recorded <= 2 * len(rows) * 3, "two kinds (with adapters, without), few table widths"


def test_shapes_are_recorded_before_they_occur(bench, family):
    names = ["base", "tuned", "other"]
    plain, made = (PagedDevice(bench.store, CONFIG, names) for _ in range(2))
    graphs = recorded(made, Watched(), most=300)
    count = 0
    while graphs.record_next(made._registry.models):
        count += 1
    assert graphs.recorded == len(graphs) == 150 and count >= 149, "half of the room"
    assert not made._pool._k[made._pool.padding].any()
    ahead = graphs.recorded
    expected, got = (drive(engine, arrivals(names), Limits(64)) for engine in (plain, made))
    assert tokens(got) == tokens(expected)
    first = drive(made, arrivals(["base"]), Limits(64))
    assert graphs.recorded - ahead <= 3, "only steps of models that do not run as one are recorded now"
    assert first.steps and graphs.replayed > 20
    made.load("tuned2")
    assert len(graphs) == 0 and graphs.record_next(made._registry.models), "they are recorded anew"


def test_results_are_left_in_one_buffer(bench, family):
    made = PagedDevice(bench.store, CONFIG, ["base"])
    graphs = recorded(made, Watched())
    drive(made, arrivals(["base"]), Limits(64))
    with torch.inference_mode():
        kept = {each.replay().popitem()[1].data_ptr() for each in graphs._recordings.values()}
    assert len(graphs) > 1 and len(kept) == 1


def test_draws_and_penalties_are_the_same(bench, family):
    plain, made = (PagedDevice(bench.store, CONFIG, ["base", "tuned"]) for _ in range(2))
    graphs = recorded(made, Watched())
    params = dict(temperature=0.9, top_p=0.8, seed=5, frequency_penalty=0.4, logprobs=3)
    expected, got = (drive(engine, arrivals(["base", "tuned"], **params), Limits(64)) for engine in (plain, made))
    assert tokens(got) == tokens(expected)
    assert graphs.replayed > graphs.recorded > 0


def test_virtual_tokens_and_prompt_logprobs_run_as_they_are(bench, family):
    names = ["prompt", "base"]
    plain, made = (PagedDevice(bench.store, CONFIG, names) for _ in range(2))
    graphs = recorded(made, Watched())
    budget = Limits(max_num_batched_tokens=1, max_num_seqs=1)  # every chunk is one token, virtual ones too
    wanted = {i: requests[:1] for i, requests in arrivals(names, prompt_logprobs=1).items()}
    expected, got = (drive(engine, wanted, budget) for engine in (plain, made))
    assert tokens(got) == tokens(expected)
    assert [step.prompt_logprobs for step in got.steps] == [step.prompt_logprobs for step in expected.steps]
    assert any(step.prompt_logprobs for step in got.steps)
    assert graphs.replayed > 0


def test_few_recordings_are_kept_and_the_oldest_makes_room(bench, family):
    names = ["base", "tuned", "other"]
    plain, made = (PagedDevice(bench.store, CONFIG, names) for _ in range(2))
    graphs = recorded(made, Watched(), most=2)
    for _ in range(2):
        expected, got = (drive(engine, arrivals(names), Limits(64)) for engine in (plain, made))
        assert tokens(got) == tokens(expected)
        assert len(graphs) == 2
    assert graphs.recorded > 2


def test_loading_and_unloading_drop_what_was_recorded(bench, family):
    made = PagedDevice(bench.store, CONFIG, ["base", "tuned"])
    graphs = recorded(made, Watched())
    expected = tokens(drive(made, arrivals(["base"]), Limits(64)))
    assert len(graphs) > 0
    made.load("base")
    assert len(graphs) > 0, "it was there"
    for change in (lambda: made.load("tuned2"), lambda: made.unload("tuned2"), lambda: made.unload("tuned")):
        change()
        assert len(graphs) == 0
        assert tokens(drive(made, arrivals(["base"]), Limits(64))) == expected
        assert len(graphs) > 0


def test_what_cannot_be_recorded_runs_as_it_is_and_is_not_tried_again(bench, family):
    plain, made = (PagedDevice(bench.store, CONFIG, ["base"]) for _ in range(2))
    recorder = Refusing()
    graphs = recorded(made, recorder)
    expected, got = (drive(engine, arrivals(["base"]), Limits(64)) for engine in (plain, made))
    assert tokens(got) == tokens(expected)
    assert 1 <= recorder.asked == graphs.refused <= 2, "once for each shape of its steps"
    assert (graphs.recorded, graphs.replayed, len(graphs)) == (0, 0, 0)


def test_the_switch(bench, family):
    def graphs(**options):
        return PagedDevice(bench.store, replace(CONFIG, **options), ["base"])._graphs

    assert graphs(graphs="off") is None and graphs(graphs="auto") is None
    assert isinstance(graphs(graphs="on"), Graphs)
    assert graphs(graphs="on", trace_segments=True) is None, "a trace tells which modules ran"
    with pytest.raises(ValueError, match="graphs must be one of"):
        EngineConfig(graphs="always")
    made, plain = (PagedDevice(bench.store, replace(CONFIG, graphs=choice), ["base"]) for choice in ("on", "off"))
    assert tokens(drive(made, arrivals(["base"]))) == tokens(drive(plain, arrivals(["base"])))
    assert made._graphs.replayed > 0
    assert graphs_for("auto", made._registry.units, made._pool) is None


def test_a_recording_keeps_the_adapters_that_it_read():
    """The stacked adapters that a recording reads stay unchanged while more adapters are stacked."""
    joined: StackCache[ForwardContext] = StackCache()
    made = []

    def make(names):
        made.append(names)
        return object()

    def frame(kept):
        return ForwardContext(torch.zeros(1, 1), (), (AdapterSpan("a", 0, 1),), kept=kept)

    kept: dict = {}
    first = joined.get_or_make(("a", "b"), frame(kept), make)
    other = joined.get_or_make(("c",), frame(None), make)
    joined.clear()
    assert joined.get_or_make(("a", "b"), frame(kept), make) is first
    assert joined.get_or_make(("a", "b"), frame({}), make) is not first
    assert joined.get_or_make(("c",), frame(None), make) is not other, "it was forgotten"
    assert made == [("a", "b"), ("c",), ("a", "b"), ("c",)]


@given(st.integers(1, 500))
def test_buckets(count):
    assert count <= bucket(count) < count + 8
    assert bucket(bucket(count)) == bucket(count)
    assert count <= table_width(count) < 2 * count
    assert [bucket(n) for n in (1, 2, 3, 5, 9, 17)] == [1, 2, 4, 8, 16, 24]
