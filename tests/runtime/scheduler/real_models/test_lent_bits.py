"""Answers over lent pages have the bits of one device's, also where a creditor dies (IL-01, IL-18).

In float32 and in bfloat16, where a changed bit is soon another token: pages of 16 tokens, loans in steps of 64, prompts
in chunks that end elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import AgentConfig, ClusterConfig, EngineConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.lending_config import LendingConfig
from runtime.types import SamplingParams, SequenceRequest
from tests.chains import put_chain, put_stitch
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.conftest import Bench
from tests.runtime.engine.test_equality import prompts
from tests.runtime.scheduler.real_models.test_long_contexts import WithoutWeights
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster

pytestmark = needs_kernels
MODELS = ("llama", "lora", "stitched")
CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=16)
LENGTHS = (330, 270)
SAMPLING = SamplingParams(20, ignore_eos=True, temperature=0.8, seed=3, logprobs=1 << 20)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = Bench(Path(tmp_path_factory.mktemp(request.param)))
    long: dict[str, Any] = dict(max_position_embeddings=512, dtype=request.param)
    made.family("llama", "llama", num_hidden_layers=3, num_key_value_heads=2, seed=1, **long)
    wide = dict(hidden_size=96, intermediate_size=80, num_attention_heads=3, num_key_value_heads=1, head_dim=32)
    made.family("llama", "wide", num_hidden_layers=2, seed=2, **wide, **long)
    made.lora("llama", "lora", seed=6)
    put_stitch(made.store, "llama", "wide", dtype=getattr(torch, request.param))
    put_chain(made.store, "stitched", ("llama", 0, 2), ("wide", 0, 2))
    yield made
    made.store.close()


def cluster_of(family: Bench, model: str, devices: int, pages: int, **loans: Any) -> VirtualCluster:
    half = half_page(family.store, CONFIG, [*MODELS, "wide"])
    described = describe_chain(family.store, model, CONFIG, half, 1)
    config = replace(CONFIG, kv_cache_memory_bytes=2 * half * pages)
    lending = LendingConfig("planned" if devices > 1 else "off", cap=1.0, recall=1.0, **loans)
    return VirtualCluster(
        chains=[described.chain],
        blocks=described.blocks,
        devices=devices,
        make_engine=lambda name: (StagedEngine if name == "d0" else WithoutWeights)(family.store, config, half, name),
        config=ClusterConfig(
            devices=devices, placement="on-demand", prefill_chunk=40, lending=lending, prefix_caching="off"
        ),
        agent_config=AgentConfig(recompute_chunk=16, fetch_window=1),
    )


def bits(cluster: VirtualCluster, model: str) -> dict[str, list[tuple[int | None, list[tuple[int, str]]]]]:
    """Ask a model twice; return the tokens, and all log-probabilities to the last bit."""
    for at, prompt in enumerate(prompts(1, LENGTHS)):
        cluster.ask(SequenceRequest(f"s{at}", f"r{at}", model, prompt, SAMPLING), at=at * MS)
    cluster.run()
    cluster.expect_empty()
    return {
        seq: [(event.token, [(top.token, top.logprob.hex()) for top in event.top]) for event in each.events]
        for seq, each in cluster.told.items()
    }


@pytest.fixture(scope="module")
def alone(family: Bench) -> dict[str, Any]:
    return {model: bits(cluster_of(family, model, 1, 4000), model) for model in MODELS}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", ["tokens", "layers"])
@pytest.mark.parametrize("ship", ["query", "pages"])
def test_lent_pages_change_no_bit(family: Bench, alone: dict[str, Any], model: str, shape: str, ship: str) -> None:
    cluster = cluster_of(family, model, 4, 48, shape=shape, ship=ship)
    assert bits(cluster, model) == alone[model]
    counters = cluster.scheduler.state().counters
    assert counters.loans > 2 and counters.failed_steps == 0
    steps = {edge % 4 for event in cluster.trace.named("kv.lend") for edge in event.extra["groups"]}
    assert steps == {0}, "loans begin and end at multiples of 64 tokens"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", ["tokens", "layers"])
def test_a_dead_creditor_changes_no_bit(family: Bench, alone: dict[str, Any], model: str, shape: str) -> None:
    cluster = cluster_of(family, model, 5, 48, shape=shape)

    killed = list[str]()

    def kill() -> None:
        lent = cluster.scheduler.lending.loans.lent()
        if lent and not killed:
            killed.append(max(lent, key=lambda each: lent[each]))
            cluster.kill(killed[0])

    for at in range(20, 400, 10):
        cluster.at(at * MS, kill)
    assert bits(cluster, model) == alone[model]
    counters = cluster.scheduler.state().counters
    assert counters.mended_tokens > 0 and counters.loss_restarts == 0, counters
