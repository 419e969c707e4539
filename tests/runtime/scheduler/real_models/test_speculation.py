"""Speculation on a real model's hop with a pruned stand-in of `surrogates`.

Exact mode gives transformers' tokens; similarity mode reports its hit rate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.config import AgentConfig, ClusterConfig, EngineConfig, SpeculationConfig, SpeculationMode
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.catalog.surrogates import surrogates_of
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.frontend.stored_tokenizer import stored_tokenizer
from runtime.grammars.sources import from_regex
from runtime.types import SamplingParams, SequenceRequest
from surrogates import RecoverySettings, SurrogateOptions, make_surrogate
from surrogates.scoring.timing import TimingSettings
from tests import checkpoints
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from zoo import Zoo

CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4)
COUNT = 16
PROMPTS = [tuple(range(3 + at, 3 + at + length)) for at, length in enumerate((3, 9, 17, 6))]


class Bench:
    """A store with a parent model of four layers, and a stand-in that has half of its second layer."""

    def __init__(self, root: Path, tokenizer: bool = False) -> None:
        self.folder = checkpoints.make(
            "llama", root / "hf", tokenizer=tokenizer, num_hidden_layers=4, num_key_value_heads=2, seed=1
        )
        text = root / "ids.jsonl"
        text.write_text(
            "\n".join(json.dumps({"token_ids": [3 + (at * step) % 40 for at in range(160)]}) for step in range(1, 30))
        )
        self.zoo = Zoo(root / "store")
        self.zoo.ingest(self.folder, name="m")
        options = SurrogateOptions(
            ratio=0.5, text=str(text), windows=24, length=16, held_out=8, scored=8, name="cheaper", device="cpu",
            recovery=RecoverySettings(how="none"), timing=TimingSettings(batch=2, context=4, pairs=1, rounds=1),
        )  # fmt: skip
        make_surrogate(self.zoo, "m", (1, 1), options)
        stock = reference(self.folder)
        self.answers = [greedy(stock, prompt, COUNT) for prompt in PROMPTS]
        self.stock = stock


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Bench(tmp_path_factory.mktemp("bench"))
    yield made
    made.zoo.close()
    torch.set_num_threads(threads)


def run(
    bench: Bench, mode: SpeculationMode, threshold: float = 0.95, *, adaptive: bool = False, kill: bool = False,
    grammar: str = "",
) -> VirtualCluster:  # fmt: skip
    store = bench.zoo.store
    half = half_page(store, CONFIG, ["m", "cheaper"])
    described = describe_chain(store, "m", CONFIG, half, 1)
    known = surrogates_of(store, "m")
    cluster = VirtualCluster(
        chains=[described.chain],
        blocks=described.blocks,
        devices=2,
        surrogates={"m": known},
        agent_config=AgentConfig(recompute_chunk=4, fetch_window=1),
        make_engine=lambda name: StagedEngine(store, CONFIG, half, name),
        config=ClusterConfig(
            devices=2, placement="partition", speculation=SpeculationConfig(mode, threshold=threshold)
        ),
    )
    part = next(use.block for use in described.chain.uses if known[0].lo < use.hi and use.lo < known[0].hi)
    cluster.scheduler.speculation.pin([(part, "d0"), (part, "d1")])
    cluster.ask(SequenceRequest("warm", "warm", "m", (1,), SamplingParams(1, ignore_eos=True)))
    for number, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(COUNT, ignore_eos=not grammar)
        if grammar:
            sampling = replace(sampling, max_tokens=80, grammar=grammar, temperature=0.9 * (number % 2), seed=number)
        asked = SequenceRequest(f"{number}", f"r{number}", "m", prompt, sampling, adaptive=adaptive)
        cluster.ask(asked, at=(20 + 3 * number) * MS)
    for at in (40, 60) if kill else ():
        cluster.at(at * MS, lambda: cluster.kill("d0"))
    cluster.run()
    cluster.expect_empty()
    return cluster


def agreeing(bench: Bench, cluster: VirtualCluster) -> list[int]:
    """Return, for each answer, how many of its leading tokens are transformers' own."""
    told = [cluster.told[str(number)].tokens for number in range(len(PROMPTS))]
    assert {len(tokens) for tokens in told} == {COUNT}
    return [
        same_tokens(bench.stock, prompt, own, got)
        for prompt, own, got in zip(PROMPTS, bench.answers, told, strict=True)
    ]


def test_the_zoos_pair_is_a_surrogate(bench: Bench) -> None:
    (known,) = surrogates_of(bench.zoo.store, "m")
    parent, other = bench.zoo.model("m").manifest, bench.zoo.model("cheaper").manifest
    assert len(other.components) == len(parent.components) - (known.hi - known.lo) + known.count
    assert 0 < known.nbytes < sum(tensor.nbytes for tensor in parent.tensors)
    assert surrogates_of(bench.zoo.store, "cheaper") == ()


@pytest.mark.parametrize("kill", [False, True])
def test_exact_tokens_are_transformers_own(bench: Bench, kill: bool) -> None:
    cluster = run(bench, "exact", kill=kill)
    assert agreeing(bench, cluster) == [COUNT] * len(PROMPTS)
    counts = cluster.scheduler.speculation.counts()
    assert counts.guesses > 0 and counts.hits + counts.misses > (
        5 if kill else 40
    )  # a sequence admitted again may run before the stand-in is loaded


def test_answers_with_a_grammar_are_those_without_speculation(tmp_path: Path) -> None:
    """The mask behind a token follows the tokens that were decided, not those that were guessed."""
    made = Bench(tmp_path, tokenizer=True)
    grammar = from_regex(r'\{"kind":"(cat|dog)","legs":[1-9]?[0-9]\}')
    plain, guessed = (run(made, mode, grammar=grammar) for mode in ("off", "exact"))
    tokenizer = stored_tokenizer(made.zoo.model("m"))
    for number in range(len(PROMPTS)):
        tokens = guessed.told[f"{number}"].tokens
        assert tokens == plain.told[f"{number}"].tokens
        assert json.loads(tokenizer.decode(tokens))["kind"] in ("cat", "dog")
    counts = guessed.scheduler.speculation.counts()
    assert counts.guesses > 0 and counts.hits + counts.misses > 20
    made.zoo.close()


def test_similarity_reports_its_hits(bench: Bench) -> None:
    """All predictions stand at the lowest threshold; at the highest none does, and tokens are exact."""
    lossy, strict = (run(bench, "similarity", threshold, adaptive=True) for threshold in (-1.0, 1.0))
    counts = lossy.scheduler.speculation.counts()
    assert counts.hits > 50 and counts.misses == 0
    assert strict.scheduler.speculation.counts().hits == 0 and agreeing(bench, strict) == [COUNT] * len(PROMPTS)
    cosines = sorted(event.extra["cosine"] for event in strict.trace.named("spec.verify"))
    assert -1 < cosines[0] < cosines[-1] < 1
    some = run(bench, "similarity", cosines[len(cosines) // 2], adaptive=True)
    counts = some.scheduler.speculation.counts()
    assert counts.hits > 10 and counts.misses > 10
    assert all(
        event.extra["stands"] == (event.extra["cosine"] >= cosines[len(cosines) // 2])
        for event in some.trace.named("spec.verify")
    )
