"""Real models over several devices: transformers' own tokens for two families, an adapter and a stitched chain, whatever moves or dies."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.config import BatchingConfig, ClusterConfig, EngineConfig, RelayConfig
from runtime.engine.chains import describe_chain
from runtime.engine.paged import PagedEngine
from runtime.engine.residents import half_page
from runtime.engine.staged import StagedEngine
from runtime.types import SamplingParams, SequenceRequest
from tests.chains import put_chain, put_stitch
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.drive import drive
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.engine.test_equality import prompts
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster

MODELS = ["llama", "neox", "lora", "stitched"]
CONFIG = EngineConfig(kv_bytes=1 << 20, page_tokens=4)
COUNT = 24
SAMPLING = SamplingParams(COUNT, ignore_eos=True)
LENGTHS = (3, 9, 17)


@pytest.fixture(scope="module")
def family(bench: Bench) -> Bench:  # noqa: F811
    bench.family("llama", "llama", num_hidden_layers=3, num_key_value_heads=2, seed=1)
    wide = dict(hidden_size=96, intermediate_size=80, num_attention_heads=6, num_key_value_heads=3, head_dim=32)
    bench.family("llama", "wide", num_hidden_layers=2, seed=2, **wide)
    bench.family("gpt_neox", "neox", num_hidden_layers=6, seed=4)
    bench.lora("llama", "lora", seed=6)
    put_stitch(bench.store, "llama", "wide")
    put_chain(bench.store, "stitched", ("llama", 0, 2), ("wide", 0, 2))
    return bench


def cluster_of(bench: Bench, devices: int, pages: int | None = None, **changes) -> VirtualCluster:  # noqa: F811
    half = half_page(bench.store, CONFIG, [*MODELS, "wide"])
    described = [describe_chain(bench.store, name, CONFIG, half, 1) for name in MODELS]
    config = CONFIG if pages is None else replace(CONFIG, kv_bytes=2 * half * pages)
    fields = dict(config=ClusterConfig(devices=devices, placing="split"), relay_config=RelayConfig(chunk=4, window=1)) | changes
    return VirtualCluster(
        chains=[each.chain for each in described], blocks=[block for each in described for block in each.blocks], devices=devices,
        make_engine=lambda name: StagedEngine(bench.store, config, half, name), **fields,
    )  # fmt: skip


def wanted(bench: Bench) -> dict[str, list[int]]:  # noqa: F811
    """By sequence: what one engine gives that has the whole models, one after another; for foundations checked against transformers."""
    answers = {}
    for model in MODELS:
        engine = PagedEngine(bench.store, CONFIG, [model])
        for number, prompt in enumerate(prompts(len(model), LENGTHS)):
            asked = {0: [SequenceRequest("a", "a", model, prompt, SAMPLING)]}
            answers[f"{model}-{number}"] = drive(engine, asked, BatchingConfig(8)).tokens("a")
            if model in ("llama", "neox"):
                stock = reference(bench.folders[model])
                assert same_tokens(stock, prompt, greedy(stock, prompt, COUNT), answers[f"{model}-{number}"]) == COUNT
    return answers


@pytest.fixture(scope="module")
def answers(family: Bench) -> dict[str, list[int]]:
    return wanted(family)


def ask(cluster: VirtualCluster, rng: random.Random) -> None:
    for model in MODELS:
        for number, prompt in enumerate(prompts(len(model), LENGTHS)):
            seq = f"{model}-{number}"
            cluster.ask(SequenceRequest(seq, f"r-{seq}", model, prompt, SAMPLING), at=rng.randrange(10 * MS))


def tokens(cluster: VirtualCluster) -> dict[str, list[int]]:
    cluster.expect_empty()
    assert {told.events[-1].finish for told in cluster.told.values()} == {"length"}
    return {seq: told.tokens for seq, told in cluster.told.items()}


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_chains_over_devices(family: Bench, answers: dict[str, list[int]], devices: int) -> None:
    cluster = cluster_of(family, devices)
    ask(cluster, random.Random(devices))
    cluster.run()
    assert tokens(cluster) == answers
    assert all(device.loaded for device in cluster.scheduler.devices)
    for chain in cluster.scheduler.chains():  # each of them is spread
        assert len({name for use in chain.uses for name in cluster.scheduler.provision.instances[use.block]}) >= min(devices, 2)


@pytest.mark.parametrize("ends", [{}, {"copy": False}, {"recompute": False}], ids=["both-ends", "recompute", "copy"])
def test_sequences_that_move_as_they_run(family: Bench, answers: dict[str, list[int]], ends: dict[str, bool]) -> None:
    rng = random.Random(len(ends))
    cluster = cluster_of(family, 3, page_bytes_per_ms=1000.0)
    ask(cluster, rng)

    def move() -> None:
        cluster.migrate_some(rng, **ends)

    for _ in range(100):
        cluster.at(rng.randrange(100 * MS), move)
    cluster.run()
    assert tokens(cluster) == answers
    counts = cluster.scheduler.handovers.counts()
    assert counts.committed > 1
    assert (counts.copied > 0, counts.recomputed > 0) == (ends != {"copy": False}, ends != {"recompute": False})


def test_deaths(family: Bench, answers: dict[str, list[int]]) -> None:
    rng = random.Random(5)
    cluster = cluster_of(family, 3)
    ask(cluster, rng)
    for _ in range(5):
        cluster.at(rng.randrange(150 * MS), lambda: cluster.kill(f"d{rng.randrange(3)}"))
    cluster.run()
    assert tokens(cluster) == answers
    assert cluster.scheduler.state().counters.preemptions > 0
