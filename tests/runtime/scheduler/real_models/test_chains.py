"""Real models over several devices give transformers' own tokens, also while blocks move or devices die.

They are two families, an adapter and a stitched chain.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from runtime.config import AgentConfig, ClusterConfig, EngineConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.types import SamplingParams, SequenceRequest
from tests.chains import put_chain, put_stitch
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.engine.test_equality import prompts
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster

MODELS = ["llama", "neox", "lora", "stitched"]
CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4)
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
    config = CONFIG if pages is None else replace(CONFIG, kv_cache_memory_bytes=2 * half * pages)
    fields = (
        dict(
            config=ClusterConfig(devices=devices, placement="partition"),
            agent_config=AgentConfig(recompute_chunk=4, fetch_window=1),
        )
        | changes
    )
    return VirtualCluster(
        chains=[each.chain for each in described],
        blocks=[block for each in described for block in each.blocks],
        devices=devices,
        make_engine=lambda name: StagedEngine(bench.store, config, half, name),
        **fields,
    )


def wanted(bench: Bench) -> dict[str, list[int]]:  # noqa: F811
    """Return, by sequence, the tokens of one engine that has the whole model and runs one request after another.

    Models without adapter or stitch are also checked against transformers.
    """
    answers = {}
    for model in MODELS:
        engine = PagedDevice(bench.store, CONFIG, [model])
        for number, prompt in enumerate(prompts(len(model), LENGTHS)):
            asked = {0: [SequenceRequest("a", "a", model, prompt, SAMPLING)]}
            answers[f"{model}-{number}"] = drive(engine, asked, Limits(8)).tokens("a")
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
    assert all(device.stages.loaded for device in cluster.scheduler.devices)
    for chain in cluster.scheduler.chains():  # each chain is spread over devices
        assert len({name for use in chain.uses for name in cluster.scheduler.block_map.instances[use.block]}) >= min(
            devices, 2
        )


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
    counts = cluster.scheduler.migrations.counts()
    assert counts.committed > 1
    assert (counts.copied > 0, counts.recomputed > 0) == (ends != {"copy": False}, ends != {"recompute": False})


#: Agents keep the inputs of their stages.
KEEPING = AgentConfig(recompute_chunk=4, fetch_window=1, activation_cache_bytes=1 << 24)


@pytest.mark.parametrize("ends", [{}, {"copy": False}], ids=["both-ends", "recompute"])
def test_blocks_of_the_middle_that_are_recomputed(
    family: Bench, answers: dict[str, list[int]], ends: dict[str, bool]
) -> None:
    """All models, including an adapter and a chain of two widths, recompute from hidden states that devices kept."""
    rng = random.Random(7 + len(ends))
    cluster = cluster_of(family, 3, page_bytes_per_ms=1000.0, agent_config=KEEPING)
    ask(cluster, rng)
    for _ in range(100):
        cluster.at(rng.randrange(100 * MS), lambda: cluster.migrate_some(rng, **ends) and None)
    cluster.run()
    assert tokens(cluster) == answers
    assert cluster.scheduler.migrations.counts().inputs > 0 and cluster.fed_bytes > 0
    fronts = {event.extra["front"] for event in cluster.trace.named("kv.recompute")}
    assert "inputs" in fronts


def kept_pages(cluster: VirtualCluster, device: str, layers: tuple[int, int], tokens: int) -> torch.Tensor:
    """Return K and V of the sequence's first tokens in these layers (whole page groups), from the device's engine."""
    node = cluster.nodes[device]
    guest = node.agent._sequence_table.sequences["a"]
    hop = next(hop for hop in guest.path if hop.device == device and hop.covers(layers))
    width = node.agent._tables.spec(guest.keys[hop.lo]).page_tokens
    part = slice(layers[0] - hop.layers[0], layers[1] - hop.layers[0])
    data = node.engine.read_pages(node.agent._tables.pages(guest.keys[hop.lo], 0, tokens // width * width, part)).data
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("model", ["llama", "lora", "stitched"])
def test_their_k_and_v_are_what_they_were(family: Bench, model: str, at: int) -> None:
    """Blocks recomputed from kept hidden states alone have the same K and V as before (BL-16's pitfall).

    It takes the first such run of blocks after the chain's start, and the last one with attention; in the stitched
    chain that last run is wider.
    """
    cluster = cluster_of(family, 3, agent_config=KEEPING)
    prompt = tuple(int(each) for each in torch.randint(5, 60, (37,), generator=torch.Generator().manual_seed(3)))
    cluster.ask(SequenceRequest("a", "r-a", model, prompt, replace(SAMPLING, max_tokens=12)))
    cluster.run(until=0)
    for node in cluster.nodes.values():  # so that slots that no layer writes are equal on all devices
        node.engine._pool.clear(range(node.engine.page_capacity))  # type: ignore[attr-defined]
    while not cluster.told["a"].tokens:
        cluster.run_one()
    sequence = cluster.scheduler.sequences["a"]
    sequence.hold(True)
    while sequence.flying:
        cluster.run_one()
    hop = [each for each in sequence.path if each.lo > 0 and each.layers[1] > each.layers[0]][at]
    computed = sequence.computed
    before = kept_pages(cluster, hop.device, hop.layers, computed)
    blocks = [number for number, use in enumerate(sequence.chain.uses) if hop.lo <= use.lo < hop.hi]
    target = next(each.device for each in sequence.path if each.device != hop.device)
    while cluster.migrate("a", range(blocks[0], blocks[-1] + 1), target, copy=False) is not None:
        cluster.run_one()
    while not cluster.trace.named("kv.meet"):
        cluster.run_one()
    # until the target has the new path
    while cluster.nodes[target].agent._sequence_table.sequences["a"].epoch != sequence.epoch:
        cluster.run_one()
    assert cluster.trace.named("kv.meet")[0].extra["recomputed"] == ((0, computed),)
    after = kept_pages(cluster, target, hop.layers, computed)
    assert before.abs().max() > 0 and torch.allclose(before, after, rtol=1e-5, atol=1e-6)
    cluster.run()
    cluster.expect_empty()


def test_deaths(family: Bench, answers: dict[str, list[int]]) -> None:
    rng = random.Random(5)
    cluster = cluster_of(family, 3)
    ask(cluster, rng)
    for _ in range(5):
        cluster.at(rng.randrange(150 * MS), lambda: cluster.kill(f"d{rng.randrange(3)}"))
    cluster.run()
    assert tokens(cluster) == answers
    assert cluster.scheduler.state().counters.preemptions > 0
