"""Prefix caching with real models over two devices: transformers' own tokens, with fewer of them computed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.config import AgentConfig, ClusterConfig, EngineConfig, PrefixCaching
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.engine.test_equality import prompts
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster

MODELS = ["llama", "neox"]
CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4)
COUNT = 8
SAMPLING = SamplingParams(COUNT, ignore_eos=True)
SYSTEM, OWN = 21, 6


@pytest.fixture(scope="module")
def family(bench: Bench) -> Bench:  # noqa: F811
    bench.family("llama", "llama", num_hidden_layers=3, num_key_value_heads=2, seed=1)
    bench.family("gpt_neox", "neox", num_hidden_layers=3, seed=4)
    return bench


@pytest.fixture(scope="module")
def asked(family: Bench) -> dict[str, SequenceRequest]:
    made = {}
    for model in MODELS:
        (system,) = prompts(len(model), (SYSTEM,))
        for number, own in enumerate(prompts(7, (OWN, OWN, OWN))):
            made[f"{model}-{number}"] = SequenceRequest(f"{model}-{number}", "r", model, (*system, *own), SAMPLING)
    return made


@pytest.fixture(scope="module")
def answers(family: Bench, asked: dict[str, SequenceRequest]) -> dict[str, tuple[Any, list[int]]]:
    """Return, by sequence, transformers' model and its tokens."""
    stock = {model: reference(family.folders[model]) for model in MODELS}
    return {seq: (stock[one.model], greedy(stock[one.model], one.prompt, COUNT)) for seq, one in asked.items()}


@pytest.mark.parametrize("sharing", ["off", "active", "cached"])
def test_requests_with_a_common_beginning_get_transformers_tokens(
    family: Bench, asked: dict[str, SequenceRequest], answers: dict[str, tuple[Any, list[int]]], sharing: PrefixCaching
) -> None:
    half = half_page(family.store, CONFIG, MODELS)
    described = [describe_chain(family.store, name, CONFIG, half, 1) for name in MODELS]
    cluster = VirtualCluster(
        chains=[each.chain for each in described],
        blocks=[block for each in described for block in each.blocks],
        devices=2,
        make_engine=lambda name: StagedEngine(family.store, CONFIG, half, name),
        config=ClusterConfig(devices=2, placement="partition", prefix_caching=sharing),
        agent_config=AgentConfig(recompute_chunk=4, fetch_window=1),
    )
    for number, one in enumerate(asked.values()):
        cluster.ask(one, at=(0, 10 * MS, 80 * MS)[number % 3])  # the third one comes when no sequence runs any more
    rng = random.Random(2)
    for _ in range(10):
        cluster.at(rng.randrange(14 * MS, 20 * MS), lambda: cluster.migrate_some(rng))
    cluster.run()
    for seq, one in asked.items():
        stock, tokens = answers[seq]
        assert same_tokens(stock, one.prompt, tokens, cluster.told[seq].tokens) == COUNT
    run = sum(sum(message.counts) for _, _, _, message in cluster.sent if type(message).__name__ == "RunRows")
    whole = len(asked) * (SYSTEM + OWN + COUNT - 1)
    widths = [each.chain.spec.page_tokens for each in described]
    spared = {"off": 0, "active": 1, "cached": 2}[sharing] * sum(SYSTEM // width * width for width in widths)
    assert (run, cluster.scheduler.sharing().tokens) == (whole - spared, spared)
    cluster.expect_empty()
