"""One engine serves eight fine-tunes that share all but one layer, and one that shares all but its adapter."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.config import EngineConfig
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.engine.test_equality import ask, prompts

LAYERS = 4


def fine_tune(bench, base: str, name: str, layer: int) -> str:
    """Add a copy of `base` with one layer's weights changed."""
    folder = bench.root / "hf" / name
    model = AutoModelForCausalLM.from_pretrained(bench.folders[base])
    generator = torch.Generator().manual_seed(layer + len(name))
    with torch.no_grad():
        for parameter in model.model.layers[layer].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    model.save_pretrained(folder)
    return bench.add(name, folder, base=base)


@pytest.fixture(scope="module")
def family(bench) -> list[str]:
    base = bench.family("llama", "base", num_hidden_layers=LAYERS, seed=9)
    tunes = [fine_tune(bench, base, f"tune{number}", number % LAYERS) for number in range(6)]
    return [base, *tunes, bench.lora(base, "lora")]


def test_each_shared_unit_runs_once_a_step_over_rows_of_all_its_models(bench, family):
    engine = PagedDevice(
        bench.store, EngineConfig(kv_cache_memory_bytes=8 << 20, page_tokens=4, trace_segments=True), family
    )
    wanted = {name: prompts(number, (5, 12)) for number, name in enumerate(family)}
    requests = [
        ask(name, prompt, f"{name}-{i}", ignore_eos=True) for name in family for i, prompt in enumerate(wanted[name])
    ]
    out = drive(engine, {0: requests[:9], 3: requests[9:]}, Limits(max_num_batched_tokens=64))
    for step in out.steps:
        ran = Counter(unit for segment in step.segments for unit in segment.components)
        assert set(ran.values()) == {1}
    busiest = max(out.steps, key=lambda step: len(step.sampled))
    shared = [segment for segment in busiest.segments if set(segment.models) == set(family)]
    assert len(busiest.sampled) == 16 and shared and shared[0].seqs == 16
    for name in family:
        if name != "lora":
            model = reference(bench.folders[name])
            for i, prompt in enumerate(wanted[name]):
                got = out.tokens(f"{name}-{i}")
                assert same_tokens(
                    model, prompt, greedy(model, prompt, 20, min_new_tokens=20, eos_token_id=[]), got
                ) == len(got)


@pytest.mark.parametrize(("kernels", "most"), [("stock", 1.01), ("auto", 1.06)])
def test_resident_weights_are_the_foundation_and_what_differs(bench, family, kernels, most):
    """Shared tensors are resident once. The kernels' panels pad an adapter's rank, which is tiny here."""
    engine = PagedDevice(
        bench.store, EngineConfig(kv_cache_memory_bytes=8 << 20, page_tokens=4, kernels=kernels), family
    )
    with bench.store.catalog.reading() as catalog:
        distinct = {tensor.digest: tensor.nbytes for name in family for tensor in catalog.model(name).tensors}
    memory = engine.memory()
    assert sum(distinct.values()) <= memory.weights <= most * sum(distinct.values())
    assert memory.weights < 0.5 * memory.weights_unshared


def test_models_of_other_widths_and_dtypes_share_the_pool(bench, family):
    """A wider model, one in bfloat16 and a family without rotary positions run in one engine, one pool and one step."""
    others = [
        bench.family("llama", "wide", hidden_size=96, num_attention_heads=6, num_key_value_heads=6),
        bench.family("gpt2", "gpt2"),
        bench.family("llama", "half", dtype="bfloat16"),
    ]
    names = [family[0], *others]
    engine = PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4), names)
    assert len({spec.page_tokens for spec in engine.models()}) > 1, "narrow models get more tokens into a page"
    wanted = {name: prompts(number, (7, 18)) for number, name in enumerate(names)}
    requests = [ask(name, prompt, f"{name}-{i}") for i in range(2) for name in names for prompt in [wanted[name][i]]]
    out = drive(engine, {i: [request] for i, request in enumerate(requests)}, Limits(max_num_batched_tokens=16))
    for name in names:
        model = reference(bench.folders[name])
        for i, prompt in enumerate(wanted[name]):
            assert same_tokens(model, prompt, greedy(model, prompt, 20), out.tokens(f"{name}-{i}")) >= 1


def test_pages_never_leak_into_another_sequence_as_nan(bench, family):
    """Pages pass from a half-precision model to a float one and back; unused parts must be finite in both dtypes."""
    half = "half" if "half" in bench.folders else bench.family("llama", "half", dtype="bfloat16")
    names = [family[0], half]
    size = PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4), names)
    page = size.memory().kv_pool // size.page_capacity
    engine = PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=page * 4 * 8, page_tokens=4), names)
    engine._pool._k.fill_(0xFF)
    engine._pool._v.fill_(0xFF)
    engine._pool.clear([engine._pool.padding])
    prompt = prompts(3, (5,))[0]
    model = reference(bench.folders[family[0]])
    for turn, name in enumerate((half, family[0], half, family[0])):
        got = drive(engine, {0: [ask(name, prompt, f"t{turn}")]}).tokens(f"t{turn}")
        if name == family[0]:
            assert same_tokens(model, prompt, greedy(model, prompt, 20), got) == len(got)


def test_a_damaged_object_is_found_on_load_and_names_its_models(bench, family, tmp_path):
    from zoo.errors import DamagedObject
    from zoo.store import Store

    copy = tmp_path / "copy"
    shutil.copytree(bench.root / "store", copy)
    with Store.open(copy) as store:
        with store.catalog.reading() as catalog:
            digest = catalog.model(family[0]).components[1].component.tensors[0][1]
        path = store.objects.path(digest)
        path.chmod(0o644)
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        with pytest.raises(DamagedObject, match=family[0]):
            PagedDevice(store, EngineConfig(kv_cache_memory_bytes=1 << 20), ["base"])


def test_prompt_logprobs_and_sampled_logprobs_match_transformers(bench, family):
    prompt = prompts(6, (11,))[0]
    engine = PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=8 << 20, page_tokens=4), family[:1])
    out = drive(
        engine, {0: [ask(family[0], prompt, "p", prompt_logprobs=3, logprobs=2)]}, Limits(max_num_batched_tokens=4)
    )
    events = out.events["p"]
    tokens = [*prompt, *out.tokens("p")]
    with torch.inference_mode():
        want = torch.log_softmax(reference(bench.folders[family[0]])(torch.tensor([tokens])).logits[0].float(), -1)
    parts = [part for event in events for part in event.prompt_logprobs]
    got = {part.start + i: (value, part.top[i]) for part in parts for i, value in enumerate(part.chosen)}
    assert sorted(got) == list(range(1, len(prompt)))
    for position, (chosen, top) in got.items():
        assert chosen.token == prompt[position]
        assert chosen.logprob == pytest.approx(want[position - 1, chosen.token].item(), abs=1e-4)
        assert [t.token for t in top] == torch.topk(want[position - 1], 3).indices.tolist()
    for index, event in enumerate(events):
        assert event.logprob == pytest.approx(want[len(prompt) + index - 1, event.token].item(), abs=1e-4)


def test_sampling_with_a_seed_survives_preemption_and_company(bench, family):
    """A seeded request gives the same tokens alone and when it is preempted in a full batch."""
    prompt = prompts(7, (9,))[0]
    params = dict(temperature=0.9, top_p=0.95, seed=42, ignore_eos=True)
    engine = PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=8 << 20, page_tokens=4), family[:2])
    alone = drive(engine, {0: [ask(family[0], prompt, "alone", **params)]}).tokens("alone")
    page = engine.memory().kv_pool // engine.page_capacity
    small = PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=page * LAYERS * 12, page_tokens=4), family[:2])
    crowd = [
        ask(family[i % 2], p, f"c{i}", temperature=1.0, seed=i, ignore_eos=True)
        for i, p in enumerate(prompts(8, (9, 9, 9)))
    ]
    out = drive(
        small,
        {0: crowd[:2], 1: [ask(family[0], prompt, "late", **params)], 2: crowd[2:]},
        Limits(max_num_batched_tokens=16),
    )
    assert out.preemptions > 0 and out.tokens("late") == alone
