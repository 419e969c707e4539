"""Stages of chains on several engines give the tokens of the whole chain.

That holds for every cut, for any other rows in the step, and when stages are moved.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from msgspec import structs

from runtime.chains import Array, Stage
from runtime.config import EngineConfig
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.types import Opened, Row, SamplingParams, SequenceRequest, StepPlan
from tests.adapters import KINDS
from tests.chains import manifest_of, put_chain, put_stitch, width_of
from tests.runtime.engine.carry import Carrier, Hopping
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.oracle import ROUNDING, greedy, reference, same_tokens
from tests.runtime.engine.test_equality import prompts
from zoo.errors import NotFound, NotServable

#: Tokens of an answer.
COUNT = 6
SAMPLING = SamplingParams(COUNT, ignore_eos=True)
#: Models: grouped heads, parallel residuals, a fine-tune, a chain of two widths, and adapters of every other kind.
PLAIN = ["llama", "neox"]
ADAPTED = ["lora", "ia3", "prefix", "prompt", "bottleneck"]
MODELS = [*PLAIN, *ADAPTED, "stitched"]
NATIVE = pytest.param("native", marks=needs_kernels)
CONFIG = EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4)


@pytest.fixture(scope="module")
def family(bench):
    add(bench, "float32")
    return bench


def add(bench, dtype: str) -> None:
    """Add the models of this file to a bench."""
    bench.family("llama", "llama", num_hidden_layers=3, num_key_value_heads=2, seed=1, dtype=dtype)
    wide = dict(hidden_size=96, intermediate_size=80, num_attention_heads=6, num_key_value_heads=3, head_dim=32)
    bench.family("llama", "wide", num_hidden_layers=2, seed=2, dtype=dtype, **wide)
    bench.family("gpt_neox", "neox", num_hidden_layers=3, seed=4, dtype=dtype)
    bench.lora("llama", "lora", seed=6)
    for kind in ("ia3", "prefix", "prompt"):
        bench.peft("llama", kind, KINDS[kind]("llama"))
    bench.bottleneck("llama", "bottleneck")
    put_stitch(bench.store, "llama", "wide", dtype=getattr(torch, dtype))
    put_chain(bench.store, "stitched", ("llama", 0, 2), ("wide", 0, 2))


def length(bench, name: str) -> int:
    return len(manifest_of(bench.store, name).components)


def engines(bench, count: int, **changes) -> list[StagedEngine]:
    config = replace(CONFIG, **changes)
    half = half_page(bench.store, config, [*MODELS, "wide"])
    return [StagedEngine(bench.store, config, half, f"d{number}") for number in range(count)]


def whole(bench, name: str, prompt: tuple[int, ...], sampling: SamplingParams = SAMPLING, **changes):
    """Run a prompt on an engine that holds the whole model."""
    engine = PagedDevice(bench.store, replace(CONFIG, **changes), [name])
    return drive(engine, {0: [SequenceRequest("a", "a", name, prompt, sampling)]}, Limits(8))


def cut_at(bench, name: str, *cuts: int) -> list[tuple[int, int, int]]:
    """Return the hops of a chain cut at `cuts`, each on the next engine."""
    bounds = [0, *cuts, length(bench, name)]
    return [(number, lo, hi) for number, (lo, hi) in enumerate(pairwise(bounds))]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, "stock") for name in MODELS),
        *(pytest.param(name, "native", marks=needs_kernels) for name in ("llama", "neox", "lora", "stitched")),
    ],
)
def test_every_cut_into_two_and_three(family, name, kernels):
    """All cuts at once: overlapping stages of one model run in one step; the prompt comes in chunks."""
    prompt = prompts(3, (9,))[0]
    carrier = Carrier(*engines(family, 3, kernels=kernels))
    inner = range(1, length(family, name))
    for cuts in [*combinations(inner, 1), *combinations(inner, 2)]:
        carrier.add(f"{cuts}", name, prompt, SAMPLING, cut_at(family, name, *cuts))
    carrier.run(4)
    wanted = whole(family, name, prompt).tokens("a")
    assert {seq: one.produced for seq, one in carrier.seqs.items()} == dict.fromkeys(carrier.seqs, wanted)
    if name in PLAIN:
        model = reference(family.folders[name])
        assert same_tokens(model, prompt, greedy(model, prompt, COUNT), wanted) == COUNT


@pytest.mark.parametrize(
    ("layers", "kernels"),
    [("fused", "stock"), pytest.param("fused", "native", marks=needs_kernels), ("stock", "stock")],
)
def test_all_models_together(family, layers, kernels):
    """Every model is cut elsewhere and has three prompts, which arrive one by one.

    Their paths: two engines, a path that returns to a device, and a whole chain on one engine.
    """
    carrier = Carrier(*engines(family, 2, layers=layers, kernels=kernels, trace_segments=True))
    wanted = {}
    for number, name in enumerate(MODELS):
        cut, end = 1 + number % 4, length(family, name)
        paths = [[(0, 0, cut), (1, cut, end)], [(1, 0, cut), (0, cut, cut + 1), (1, cut + 1, end)], [(0, 0, end)]]
        for index, prompt in enumerate(prompts(number, (3, 13, 6))):
            carrier.add(f"{name}{index}", name, prompt, SAMPLING, paths[index])
            wanted[f"{name}{index}"] = whole(family, name, prompt, layers=layers, kernels=kernels).tokens("a")
        carrier.step(5)
    carrier.run(5)
    assert {seq: one.produced for seq, one in carrier.seqs.items()} == wanted


def test_what_stages_have_in_common_is_held_and_run_once(family):
    """Stages of a base, of its adapter and of a chain: the base's units run once over the rows of all three."""
    (engine,) = engines(family, 1, trace_segments=True)
    stages = [Stage("llama", 1, 3), Stage("lora", 1, 5), Stage("stitched", 2, 4)]
    specs = [engine.load(stage) for stage in stages]
    opened = tuple(
        Opened(SequenceRequest(f"s@{stage.lo}#{n}", "r", stage.id, (1, 2), SAMPLING)) for n, stage in enumerate(stages)
    )
    width = width_of(family.store, "llama")
    rows = tuple(
        Row(one.request.seq, one.request.model, (0, 0), 0, (tuple(range(10 * n, 10 * n + specs[n].kv_layers)),), False)
        for n, one in enumerate(opened)
    )
    hidden = Array("float32", (2, width), bytes(torch.randn(2, width).numpy()))
    result = engine.run(StepPlan(1, rows, opened), {row.seq: hidden for row in rows})
    chain = [placed.component.base_digest for placed in manifest_of(family.store, "llama").components]
    ran = {unit: set(run.models) for run in result.result.segments for unit in run.components}
    assert len(ran) == sum(len(run.components) for run in result.result.segments), "each unit once"
    ids = [stage.id for stage in stages]
    assert ran == {chain[1]: set(ids[:2]), chain[2]: set(ids), chain[3]: set(ids[1:]), chain[4]: {ids[1]}}
    assert all(result.outputs[row.seq].shape == (2, width) for row in rows) and not result.result.sampled


@needs_kernels
def test_stages_run_their_layers_in_one_call(family):
    """Steps of stages without embedding or head call no module; from the second decode on nor does the embedding."""
    (engine,) = engines(family, 1, kernels="native", weights="packed")
    carrier = Carrier(engine)
    one = carrier.add("a", "llama", prompts(3, (9,))[0], SAMPLING, [(0, 0, 3), (0, 3, 7), (0, 7, 8)])
    seen = []
    for unit in engine._registry.units.units.values():
        unit.module.register_forward_hook(lambda module, given, out, kind=unit.kind: seen.append(kind))
    carrier.run()
    assert one.produced == whole(family, "llama", one.request.prompt).tokens("a")
    assert sorted(seen) == sorted(["embedding"] * 2 + ["lm_head"] * COUNT)


@pytest.mark.parametrize("chunk", [1000, 3])
@pytest.mark.parametrize("name", ["llama", "prefix", "stitched"])
def test_log_probabilities_of_prompts(family, name, chunk):
    prompt = prompts(5, (11,))[0]
    sampling = replace(SAMPLING, max_tokens=2, logprobs=2, prompt_logprobs=1)
    carrier = Carrier(*engines(family, 3))
    last = length(family, name) - 1
    carrier.add("mid", name, prompt, sampling, cut_at(family, name, 2, 4))
    carrier.add("head", name, prompt, sampling, cut_at(family, name, 3, last))
    carrier.run(chunk)
    events = whole(family, name, prompt, sampling).events["a"]
    wanted = [one for event in events for part in event.prompt_logprobs for one in part.chosen]
    for one in carrier.seqs.values():
        parts = one.prompts
        assert [part.start + i for part in parts for i in range(len(part.chosen))] == list(range(1, len(prompt)))
        got = [each for part in parts for each in part.chosen]
        assert [each.token for each in got] == [each.token for each in wanted]
        assert [each.logprob for each in got] == pytest.approx([each.logprob for each in wanted], abs=1e-4)
        assert [each.logprob for each in one.sampled] == pytest.approx([event.logprob for event in events], abs=1e-4)


def test_penalties_and_seeds_go_by_the_sequence(family):
    """The head's stage samples by the prompt and the earlier tokens, known from its own rows or sent when it opens."""
    prompt = prompts(8, (7,))[0]
    sampling = SamplingParams(
        10, temperature=1.5, seed=7, repetition_penalty=1.3, presence_penalty=0.4, ignore_eos=True
    )
    carrier = Carrier(*engines(family, 3))
    one = carrier.add("a", "llama", prompt, sampling, cut_at(family, "llama", 3)[:2])
    for at in range(5):
        carrier.step()
        if at == 3:
            carrier.move("a", 1, 2)
    carrier.run()
    assert one.produced == whole(family, "llama", prompt, sampling).tokens("a")


@pytest.mark.parametrize("kernels", ["stock", NATIVE])
@pytest.mark.parametrize("name", ["llama", "neox", "prefix", "stitched"])
def test_moved_in_the_midst(family, name, kernels):
    """Every hop moves to another engine at some time, during prefill and decode, beside another sequence."""
    carrier = Carrier(*engines(family, 3, kernels=kernels))
    prompt = prompts(9, (10,))[0]
    one = carrier.add("a", name, prompt, SAMPLING, cut_at(family, name, 3))
    carrier.add("other", name, prompts(1, (21,))[0], SAMPLING, [(2, 0, 3), (2, 3, length(family, name))])
    for hop, to in ((0, 2), (1, 2), (0, 1), (1, 0), (0, 2)):
        carrier.step(3)
        carrier.move("a", hop, to)
    carrier.run(3)
    assert one.produced == whole(family, name, prompt).tokens("a")


def test_pages_that_were_not_moved_are_missed(family):
    """Negative control: without the contents of the pages, the next token's log-probability changes."""
    prompt = prompts(9, (10,))[0]
    found = []
    for copy in (True, False):
        carrier = Carrier(*engines(family, 3))
        one = carrier.add("a", "llama", prompt, replace(SAMPLING, logprobs=0), cut_at(family, "llama", 3))
        carrier.step()
        carrier.move("a", 0, 2, copy=copy)
        carrier.step()
        found.append(one.sampled[-1].logprob)
    assert found[0] != pytest.approx(found[1], abs=1e-4)


def test_bfloat16(bench_half):
    """Half-precision hidden states are sent unchanged: tokens differ only at ties within rounding."""
    agreed = 0
    for name in ("llama", "neox"):
        carrier = Carrier(*engines(bench_half, 2))
        model = reference(bench_half.folders[name])
        for index, prompt in enumerate(prompts(4, (1, 8, 19))):
            carrier.add(f"{index}", name, prompt, SAMPLING, cut_at(bench_half, name, 2 + index))
        carrier.run(8)
        for one in carrier.seqs.values():
            agreed += same_tokens(
                model,
                one.request.prompt,
                greedy(model, one.request.prompt, COUNT),
                one.produced,
                ROUNDING[torch.bfloat16],
            )
    assert agreed >= 4 * COUNT, "hardly a token agrees"


@pytest.fixture(scope="module")
def bench_half(tmp_path_factory):
    from tests.runtime.engine.conftest import Bench

    made = Bench(tmp_path_factory.mktemp("half"))
    add(made, "bfloat16")
    yield made
    made.store.close()


def test_a_stage_holds_its_own_weights_only(family):
    (engine,) = engines(family, 1, weights="plain")
    end = length(family, "lora")
    every = manifest_of(family.store, "llama")
    sizes = {tensor.digest: tensor.nbytes for tensor in every.tensors}
    for lo, hi in [(0, 1), (1, 2), (2, 5), (end - 1, end), (0, end)]:
        engine.load(Stage("llama", lo, hi))
        own = {digest for placed in every.components[lo:hi] for _, digest in placed.component.tensors}
        assert engine.memory().weights == engine.memory().weights_unshared == sum(sizes[digest] for digest in own)
        engine.unload(Stage("llama", lo, hi))
        assert engine.memory().weights == 0
    engine.load(Stage("llama", 1, 5))
    before = engine.memory().weights
    engine.load(Stage("llama", 3, 5))
    assert engine.memory().weights == before < engine.memory().weights_unshared
    engine.load(Stage("lora", 1, 5))
    assert before < engine.memory().weights < 1.5 * before, "an adapter came, its base was here"
    engine.unload(Stage("llama", 1, 5))
    engine.unload(Stage("lora", 1, 5))
    assert 0 < engine.memory().weights < before


def test_specs(family):
    (engine,) = engines(family, 1)
    for name in MODELS:
        (of_whole,) = PagedDevice(family.store, CONFIG, [name]).models()
        end = length(family, name)
        parts = [engine.load(Stage(name, lo, hi)) for lo, hi in [(0, 1), (1, 3), (3, end - 1), (end - 1, end)]]
        assert [part.name for part in parts] == [
            f"{name}[0:1]",
            f"{name}[1:3]",
            f"{name}[3:{end - 1}]",
            f"{name}[{end - 1}:{end}]",
        ]
        assert (
            parts[0].kv_layers == parts[-1].kv_layers == 0
            and sum(part.kv_layers for part in parts) == of_whole.kv_layers
        )
        tokens = engine.load(Stage(name, 0, end)).page_tokens
        assert all(
            part == replace(of_whole, name=part.name, kv_layers=part.kv_layers, page_tokens=tokens) for part in parts
        )
        assert parts[1] == engine.load(Stage(name, 1, 3)), "loaded already"


def started(family) -> tuple[StagedEngine, Row]:
    (engine,) = engines(family, 1)
    stage = Stage("llama", 1, 4)
    layers = engine.load(stage).kv_layers
    engine.run(StepPlan(1, (), (Opened(SequenceRequest("a@1", "r", stage.id, (1, 2), SAMPLING)),)), {})
    return engine, Row("a@1", stage.id, (0, 0), 0, (tuple(range(layers)),), False)


@pytest.mark.parametrize(
    "wrong", [{}, {"shape": (1, 64)}, {"shape": (2, 60)}, {"dtype": "bfloat16"}, {"data": bytes(8)}]
)
def test_hidden_states_that_do_not_fit(family, wrong):
    engine, row = started(family)
    right = Array("float32", (2, width_of(family.store, "llama")), bytes(2 * 4 * width_of(family.store, "llama")))
    with pytest.raises(ValueError):
        engine.run(StepPlan(2, (row,)), {"a@1": structs.replace(right, **wrong)} if wrong else {})
    engine.run(StepPlan(3, (), (Opened(SequenceRequest("a@1", "r", row.model, (1, 2), SAMPLING)),), ("a@1",)), {})
    assert engine.run(StepPlan(4, (row,)), {"a@1": right}).outputs["a@1"].shape == right.shape


def test_pages_are_bytes(family):
    engine, row = started(family)
    width = width_of(family.store, "llama")
    engine.run(StepPlan(2, (row,)), {"a@1": Array("float32", (2, width), bytes(torch.randn(2, width).numpy()))})
    pages = row.new_pages[0]
    held = engine.read_pages(pages)
    assert (held.dtype, held.shape, memoryview(held.data).nbytes) == (
        "uint8",
        (len(pages), engine.page_bytes),
        len(pages) * engine.page_bytes,
    )
    kept = bytes(held.data)
    assert any(kept[: engine.page_bytes // 2]) and any(kept[engine.page_bytes // 2 : engine.page_bytes])
    engine.write_pages([7, 5], structs.replace(held, data=kept))
    engine.write_pages(pages, structs.replace(held, data=bytes(len(kept))))
    assert bytes(held.data) == kept, "what was read is a copy"
    assert bytes(engine.read_pages([7, 5]).data) == kept and not any(engine.read_pages(pages).data)
    assert engine.read_pages([]).shape == (0, engine.page_bytes)
    for wrong in (
        structs.replace(held, shape=(1, len(kept))),
        structs.replace(held, dtype="float32"),
        structs.replace(held, data=kept[1:]),
    ):
        with pytest.raises(ValueError):
            engine.write_pages(pages, wrong)
    for beyond in (-1, engine.page_capacity):
        with pytest.raises(ValueError, match="pages are numbered"):
            engine.read_pages([beyond])


def test_prompts_that_share_full_pages(family):
    """The second sequence begins behind the first one's pages and gives the same result."""
    (engine,) = engines(family, 1)
    stage = Stage("llama", 0, length(family, "llama"))
    spec = engine.load(stage)
    width, layers = spec.page_tokens, spec.kv_layers
    prompt = tuple(range(3, 3 + width + 2))
    groups = [tuple(range(n * layers, (n + 1) * layers)) for n in range(3)]
    opened = [
        Opened(SequenceRequest(seq, "r", stage.id, prompt, replace(SAMPLING, logprobs=0))) for seq in ("a@0", "b@0")
    ]
    first = engine.run(StepPlan(1, (Row("a@0", stage.id, prompt, 0, (groups[0], groups[1])),), (opened[0],)), {})
    second = engine.run(
        StepPlan(2, (Row("b@0", stage.id, prompt[width:], width, (groups[0], groups[2])),), (opened[1],)), {}
    )
    (a,), (b,) = first.result.sampled, second.result.sampled
    assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-5)


def test_stages_that_cannot_be(family):
    (engine,) = engines(family, 1)
    for lo, hi in ((0, 0), (3, 2), (-1, 2), (1, 99)):
        with pytest.raises(NotServable, match="components"):
            engine.load(Stage("llama", lo, hi))
    with pytest.raises(NotFound):
        engine.load(Stage("nobody", 0, 1))
    with pytest.raises(NotFound):
        engine.unload(Stage("llama", 0, 1))
    assert engine.memory().weights == 0


def test_what_is_dropped_leaves_nothing_behind(family):
    """The pages of a sequence that is dropped half-way serve the next one."""
    carrier = Carrier(*engines(family, 2))
    prompt = prompts(2, (9,))[0]
    for turn in range(3):
        carrier.add(f"a{turn}", "llama", prompt, SAMPLING, cut_at(family, "llama", 2))
        carrier.step(5)
        carrier.drop(f"a{turn}")
    one: Hopping = carrier.add("b", "llama", prompt, SAMPLING, cut_at(family, "llama", 2))
    carrier.run()
    assert one.produced == whole(family, "llama", prompt).tokens("a")
