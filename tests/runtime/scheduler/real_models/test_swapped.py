"""Sequences of real models give way: what comes back from host memory goes on with the same tokens, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from runtime.config import AgentConfig, ClusterConfig, EngineConfig, PreemptionMode
from runtime.control.counters import AgentCounters
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.types import SamplingParams, SequenceRequest, TokenEvent
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.test_equality import prompts
from tests.runtime.scheduler.virtual_cluster import VirtualCluster

CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4)
COUNT = 24
SAMPLINGS = (
    SamplingParams(COUNT, ignore_eos=True, logprobs=2),
    SamplingParams(COUNT, temperature=0.9, top_p=0.95, top_k=40, seed=7, ignore_eos=True, logprobs=2),
    SamplingParams(COUNT, temperature=0.7, seed=11, repetition_penalty=1.3, ignore_eos=True, logprobs=2),
)


@pytest.fixture(scope="module")
def family(bench: Bench) -> Bench:  # noqa: F811
    bench.family("llama", "llama", num_hidden_layers=3, num_key_value_heads=2, seed=1)
    bench.family("llama", "half", num_hidden_layers=3, num_key_value_heads=2, seed=1, dtype="bfloat16")
    return bench


def run(
    family: Bench, model: str, devices: int, pages: int, mode: PreemptionMode
) -> tuple[dict[str, Sequence[TokenEvent]], AgentCounters]:
    """Return the events of six sequences, and what the scheduler counted."""
    half = half_page(family.store, CONFIG, [model])
    config = EngineConfig(kv_cache_memory_bytes=2 * half * pages, page_tokens=4)
    described = describe_chain(family.store, model, CONFIG, half, 1)
    cluster: Any = VirtualCluster(
        chains=[described.chain],
        blocks=described.blocks,
        devices=devices,
        make_engine=lambda name: StagedEngine(family.store, config, half, name),
        config=ClusterConfig(devices=devices, placement="partition", preemption_mode=mode, prefill_chunk=8),
        agent_config=AgentConfig(host_memory_bytes=1 << 20),
    )
    texts = prompts(5, (13, 9, 17, 11, 10, 14))
    for at, text in enumerate(texts):
        cluster.ask(SequenceRequest(f"s{at}", "r", model, text, SAMPLINGS[at % len(SAMPLINGS)]))
    cluster.run()
    cluster.expect_empty()
    return {seq: told.events for seq, told in cluster.told.items()}, cluster.scheduler.state().counters


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("model", ["llama", "half"])
def test_tokens_and_scores_are_those_of_undisturbed_sequences(family: Bench, model: str, devices: int) -> None:
    undisturbed, counted = run(family, model, devices, 400, "swap")
    assert counted.preemptions == 0
    found, counted = run(family, model, devices, 66 // devices, "swap")
    assert counted.swapped_in == counted.swapped_out == counted.preemptions > 0 == counted.resumed_tokens
    for seq, events in undisturbed.items():
        same = [(event.token, event.logprob, event.top) for event in found[seq]]
        assert same == [(event.token, event.logprob, event.top) for event in events], seq
