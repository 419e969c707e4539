"""Answers with a grammar where sequences are cut over devices, moved, handed off, swapped or lent: those of one device.

A grammar's state is a function of the tokens so far, so that none of these has to carry it along.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from runtime.config import AgentConfig, ClusterConfig, EngineConfig
from runtime.control.counters import AgentCounters
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.frontend.stored_tokenizer import stored_tokenizer
from runtime.grammars.sources import from_regex
from runtime.lending_config import LendingConfig
from runtime.types import SamplingParams, SequenceRequest
from tests import checkpoints
from tests.chains import put_chain, put_stitch
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from zoo.handle import ModelHandle

CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4)
#: JSON without white space, of which a model with random weights would write a lot.
JSON = from_regex(r'\{"kind":"(cat|dog)","legs":[1-9]?[0-9]\}')
MODELS = ("texts", "stitched")


@pytest.fixture(scope="module")
def family(bench: Bench) -> Bench:  # noqa: F811
    bench.add("texts", checkpoints.make("llama", bench.root / "hf" / "texts"))
    bench.add("other", checkpoints.make("llama", bench.root / "hf" / "other", seed=9))
    put_stitch(bench.store, "texts", "other")
    put_chain(bench.store, "stitched", ("texts", 0, 1), ("other", 1, 2))
    return bench


def run(
    family: Bench, devices: int = 1, pages: int = 4000, act: Callable[[VirtualCluster], None] | None = None,
    agent: AgentConfig | None = None, **config: Any,
) -> tuple[dict[str, list[int]], AgentCounters]:  # fmt: skip
    """Return the tokens of ten answers, greedy and sampled, eight of them with a grammar, and what was counted."""
    half = half_page(family.store, CONFIG, list(MODELS))
    sized = EngineConfig(kv_cache_memory_bytes=2 * half * pages, page_tokens=4)
    described = [describe_chain(family.store, model, CONFIG, half, 1) for model in MODELS]
    cluster: Any = VirtualCluster(
        chains=[each.chain for each in described],
        blocks=[block for each in described for block in each.blocks],
        devices=devices,
        make_engine=lambda name: StagedEngine(family.store, sized, half, name),
        config=ClusterConfig(devices=devices, prefill_chunk=8, **config),
        agent_config=agent or AgentConfig(),
    )
    for at in range(10):
        grammar = "" if at in (3, 6) else JSON
        sampling = SamplingParams(40, temperature=0.9 * (at % 2), seed=at, ignore_eos=not grammar, grammar=grammar)
        prompt = tuple(range(40 + at, 51 + at))
        cluster.ask(SequenceRequest(f"{at}", "r", MODELS[at // 5], prompt, sampling), at=at * MS // 4)
    if act is not None:
        act(cluster)
    cluster.run()
    cluster.expect_empty()
    return {seq: told.tokens for seq, told in cluster.told.items()}, cluster.scheduler.state().counters


@pytest.fixture(scope="module")
def alone(family: Bench) -> dict[str, list[int]]:
    found, _ = run(family)
    with family.store.catalog.reading() as reader:
        tokenizer = stored_tokenizer(ModelHandle(family.store, reader.model("texts")))
    for at in (0, 1, 2, 4, 5, 7, 8, 9):
        assert json.loads(tokenizer.decode(found[f"{at}"]))["kind"] in ("cat", "dog")
    return found


@pytest.mark.parametrize("devices", [2, 3])
def test_chains_that_are_cut(family: Bench, alone: dict[str, list[int]], devices: int) -> None:
    found, _ = run(family, devices, placement="partition")
    assert found == alone


def test_sequences_that_move(family: Bench, alone: dict[str, list[int]]) -> None:
    rng = random.Random(3)

    def moves(cluster: VirtualCluster) -> None:
        for at in range(40):
            cluster.at(at * MS, lambda: cluster.migrate_some(rng) and None)

    found, counted = run(family, 3, act=moves, placement="partition")
    assert found == alone and counted.moves > 0


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("prefill", "decode", "both")])
def test_hand_offs(family: Bench, alone: dict[str, list[int]], roles: tuple[Any, ...]) -> None:
    found, counted = run(family, len(roles), roles=tuple((f"d{at}", role) for at, role in enumerate(roles)))
    assert found == alone and counted.handoffs > 0


def test_swaps_to_host_memory(family: Bench, alone: dict[str, list[int]]) -> None:
    agent = AgentConfig(host_memory_bytes=1 << 20)
    found, counted = run(family, pages=60, agent=agent, preemption_mode="swap")
    assert found == alone and counted.swapped_in > 0


def test_lent_pages(family: Bench, alone: dict[str, list[int]]) -> None:
    lending = LendingConfig("planned", cap=1.0)
    found, counted = run(family, 2, 40, placement="replicate", lending=lending, prefix_caching="off")
    assert found == alone and counted.loans > 0


def test_devices_that_die(family: Bench, alone: dict[str, list[int]]) -> None:
    def kills(cluster: VirtualCluster) -> None:
        for at in (4, 9, 15):
            cluster.at(at * MS, lambda at=at: cluster.kill(f"d{at % 2}"))

    found, counted = run(family, 2, act=kills, placement="partition", max_crashes=9)
    assert found == alone and counted.resumed_tokens > 0
