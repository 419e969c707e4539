"""Chains of several models served with their parents: exact tokens, each shared block once, any shapes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from runtime.config import EngineConfig
from runtime.types import SamplingParams, SequenceRequest
from surgery.ingest.ingest import ingest
from surgery.models.export import export
from surgery.sources import open_source
from tests.chains import manifest_of, put_chain, put_changed
from tests.runtime.engine.chain_family import CHAINS, COUNT, add_family, agreeing
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.oracle import Recomputed
from tests.runtime.engine.test_equality import engine, prompts


@pytest.fixture(scope="module")
def family(bench) -> list[str]:
    return add_family(bench)


def ask(model: str, prompt: tuple[int, ...], seq: str, **params) -> SequenceRequest:
    return SequenceRequest(seq, seq, model, prompt, SamplingParams(max_tokens=COUNT, ignore_eos=True, **params))


@pytest.mark.parametrize("layers", ["fused", "stock"])
@pytest.mark.parametrize("name", CHAINS)
def test_alone(bench, family, name, layers):
    made = engine(bench, name, layers=layers)
    wanted = [(f"{i}", prompt) for i, prompt in enumerate(prompts(1, (1, 9, 26)))]
    out = drive(made, {i: [ask(name, prompt, seq)] for i, (seq, prompt) in enumerate(wanted)}, Limits(8))
    assert agreeing(bench, name, wanted, out, torch.float32) == 3 * COUNT


@pytest.mark.parametrize("layers", ["fused", "stock"])
def test_all_with_their_parents_in_one_engine(bench, family, layers):
    """Rows arrive late, prompts are cut into chunks, the pool is too small for all at once; every token is exact."""
    made = engine(bench, *family, pages=135, layers=layers)
    wanted = {name: [(f"{name}.{i}", p) for i, p in enumerate(prompts(n, (4, 11)))] for n, name in enumerate(family)}
    requests = [ask(name, p, seq) for i in range(2) for name in family for seq, p in [wanted[name][i]]]
    out = drive(made, {i // 3: requests[i : i + 3] for i in range(0, len(requests), 3)}, Limits(24, max_num_seqs=14))
    assert out.preemptions > 0, "the pool was to be too small"
    for name in family:
        assert agreeing(bench, name, wanted[name], out, torch.float32) == 2 * COUNT, name


def test_two_components_at_one_place_of_one_source(bench, family):
    """A chain of two fine-tunes lists their config once: the modules of one layer index are needed twice."""
    bench.family("llama", "tuned", num_hidden_layers=4, seed=11)
    put_chain(bench.store, "of tunes", ("narrow", 0, 2), ("tuned", 1, 3), ("thin", 0, 1))

    def one_source(config):
        assert config["sources"][0] == config["sources"][1]
        for link in config["chain"]:
            link["source"] = 0 if link["source"] == 1 else link["source"]

    put_changed(bench.store, "of tunes", "of tunes, one source", config=one_source)
    wanted = [("a", prompts(1, (9,))[0])]
    out = drive(engine(bench, "of tunes, one source"), {0: [ask("of tunes, one source", wanted[0][1], "a")]})
    assert agreeing(bench, "of tunes", wanted, out, torch.float32) == COUNT


def test_what_a_chain_shares_with_its_parents_runs_once_over_the_rows_of_all(bench, family):
    """A parent, its adapters, and chains with fewer tokens per page: the trace shows each unit's rows."""
    names = ["narrow", "lora", "stitched", "pruned", "shifted", "with an adapter"]
    made = PagedDevice(
        bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, trace_segments=True), names
    )
    assert len({spec.page_tokens for spec in made.models()}) > 1, (
        "these were to put different numbers of tokens into a page"
    )
    requests = [ask(name, p, f"{name}.{i}") for name in names for i, p in enumerate(prompts(5, (3, 8)))]
    out = drive(made, {0: requests}, Limits(200))
    for step in out.steps:
        ran = Counter(unit for run in step.segments for unit in run.components)
        assert set(ran.values()) == {1}
    last = out.steps[-1]
    assert len(last.sampled) == len(requests)
    units = {unit: run for run in last.segments for unit in run.components}
    chain = [placed.component.base_digest for placed in manifest_of(bench.store, "narrow").components]
    assert all(set(units[unit].models) == set(names) - {"shifted"} for unit in chain[1:3])
    assert all(
        units[unit].models == tuple(names) and units[unit].seqs == len(requests) for unit in (chain[0], *chain[3:5])
    )
    assert set(units[chain[7]].models) == {"narrow", "lora", "pruned", "shifted"}, (
        "the last layer, at another depth in one of the chains"
    )
    stitches = [run for run in last.segments if run.kind == "stitch"]
    assert [(run.models, run.layers, len(run.components)) for run in stitches] == [
        (("stitched", "with an adapter"), (None,), 1)
    ]


def test_weights_that_a_chain_shares_are_resident_once(bench, family):
    names = [name for name in family if "adapter" not in name and "lora" not in name]
    made = PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, weights="plain"), names)
    distinct = {tensor.digest: tensor.nbytes for name in names for tensor in manifest_of(bench.store, name).tensors}
    assert made.memory().weights == sum(distinct.values())
    for name in names:
        made.unload(name)
    assert made.memory().weights == 0


def test_unloading_a_chain_leaves_its_parents_as_they_were(bench, family):
    made = engine(bench, "narrow", "lora2", "with several adapters")
    prompt = prompts(5, (9,))[0]
    before = [drive(made, {0: [ask(name, prompt, name)]}).tokens(name) for name in ("narrow", "lora2")]
    made.unload("with several adapters")
    assert [drive(made, {0: [ask(name, prompt, name)]}).tokens(name) for name in ("narrow", "lora2")] == before
    made.unload("lora2")
    distinct = {tensor.digest: tensor.nbytes for tensor in manifest_of(bench.store, "narrow").tensors}
    assert made.memory().weights == sum(distinct.values())


@pytest.mark.parametrize("name", ["stitched", "pruned", "repeated and stitched", "with several adapters"])
def test_logprobs_are_those_of_the_stack(bench, family, name):
    prompt = prompts(6, (11,))[0]
    asked = ask(name, prompt, "p", prompt_logprobs=0, logprobs=0)
    out = drive(engine(bench, name), {0: [asked]}, Limits(max_num_batched_tokens=4))
    with torch.inference_mode():
        logits = Recomputed(bench.store, name)(torch.tensor([[*prompt, *out.tokens("p")]])).logits[0].float()
    want = torch.log_softmax(logits, -1)
    chosen = [each for event in out.events["p"] for part in event.prompt_logprobs for each in part.chosen]
    assert [each.token for each in chosen] == list(prompt[1:])
    got = [each.logprob for each in chosen] + [event.logprob for event in out.events["p"]]
    tokens = torch.tensor([*prompt[1:], *out.tokens("p")])
    expected = want[: len(tokens)].gather(1, tokens[:, None])[:, 0]
    scale = logits.abs().max().item()
    torch.testing.assert_close(torch.tensor(got), expected, atol=scale * 2e-5, rtol=0)


def test_a_chain_that_went_out_and_came_back_gives_the_same_tokens(bench, family, tmp_path):
    export(bench.store, "of three families", tmp_path / "out")
    ingest(bench.store, open_source(str(tmp_path / "out")), "back")
    (prompt,) = prompts(1, (9,))
    out = drive(
        engine(bench, "of three families", "back"),
        {0: [ask(name, prompt, name) for name in ("of three families", "back")]},
        Limits(8),
    )
    assert len(out.tokens("back")) == COUNT and out.tokens("back") == out.tokens("of three families")
