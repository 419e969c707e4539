"""Real models that are updated under load, or served by a composed variant.

Each sequence has the tokens of the version it began with, or of the composed model it was given, and no other
version stays loaded.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.chains import Stage
from runtime.config import AgentConfig, ClusterConfig, EngineConfig
from runtime.control.scheduler_io import ServeModel
from runtime.engine.catalog.describe import DescribedChain, describe_chain
from runtime.engine.catalog.variants import variants_in
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.policy.routing.variants import DispatchLimits
from runtime.scheduler.admission.variant_choice import VariantChoice
from runtime.types import SamplingParams, SequenceRequest
from tests.chains import put_chain
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.test_equality import prompts
from tests.runtime.scheduler.changing import Changing
from tests.runtime.scheduler.virtual_cluster import MS
from zoo.errors import NotFound
from zoo.records import Equivalence, ScoredRun

CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4)
SAMPLING = SamplingParams(12, ignore_eos=True)
PROMPTS = prompts(3, (3, 9, 17, 5, 8, 12))


@pytest.fixture(scope="module")
def family(bench: Bench) -> Bench:  # noqa: F811
    bench.family("llama", "base", num_hidden_layers=3, num_key_value_heads=2, seed=1)
    bench.family("llama", "slim", num_hidden_layers=3, num_key_value_heads=2, intermediate_size=16, seed=2)
    bench.lora("base", "one", seed=6)
    bench.lora("base", "two", seed=7)
    return bench


def described(bench: Bench, name: str, serve_as: str | None = None) -> DescribedChain:  # noqa: F811
    return describe_chain(bench.store, name, CONFIG, half_page(bench.store, CONFIG, ["base"]), 1, serve_as)


def own_tokens(bench: Bench, name: str) -> list[list[int]]:  # noqa: F811
    engine = PagedDevice(bench.store, CONFIG, [name])
    return [drive(engine, {0: [SequenceRequest("a", "a", name, p, SAMPLING)]}, Limits(8)).tokens("a") for p in PROMPTS]


def engine_of(bench: Bench, device: str) -> StagedEngine:  # noqa: F811
    return StagedEngine(bench.store, CONFIG, half_page(bench.store, CONFIG, ["base"]), device)


def test_an_adapter_is_replaced_while_sequences_run(family: Bench) -> None:
    """Both versions have the same base, whose blocks stay and serve both."""
    old, new = described(family, "one", "tuned"), described(family, "two", "tuned")
    assert [block.id for block in old.blocks] == [
        block.id for block in new.blocks
    ] and old.chain.version != new.chain.version
    cluster = Changing(
        chains=[old.chain],
        blocks=old.blocks,
        devices=2,
        make_engine=lambda name: engine_of(family, name),
        config=ClusterConfig(devices=2, placement="partition"),
        agent_config=AgentConfig(recompute_chunk=4, fetch_window=1),
    )
    rng = random.Random(1)
    for number in range(24):
        asked = SequenceRequest(f"s{number}", f"r{number}", "tuned", PROMPTS[number % len(PROMPTS)], SAMPLING)
        cluster.ask(asked, at=rng.randrange(60 * MS))
    cluster.at(25 * MS, lambda: cluster.tell(ServeModel(new.chain, new.blocks)))
    cluster.run()
    cluster.expect_empty()
    wanted = {old.chain.loaded_as: own_tokens(family, "one"), new.chain.loaded_as: own_tokens(family, "two")}
    got = {seq: told.tokens for seq, told in cluster.told.items()}
    assert got == {seq: wanted[cluster.given[seq]][int(seq[1:]) % len(PROMPTS)] for seq in got}
    assert set(cluster.given.values()) == set(wanted) and [each.error for each in cluster.updated] == [""]
    assert cluster.loaded() == {new.chain.loaded_as}
    fresh = sum(_loaded_alone(family, device.name, list(device.stages.wanted)) for device in cluster.scheduler.devices)
    assert sum(node.engine.memory().weights for node in cluster.living()) == fresh


def _loaded_alone(bench: Bench, device: str, stages: list[Stage]) -> int:  # noqa: F811
    engine = engine_of(bench, device)
    for stage in stages:
        engine.load(stage)
    return engine.memory().weights


def test_a_composed_model_stands_in_where_that_is_allowed(family: Bench) -> None:
    """Blocks of the composed model that differ from the requested model's are smaller, and so faster."""
    store = family.store
    put_chain(store, "mixed", ("base", 0, 2), ("slim", 2, 3), embedding="base", head="base")
    put_chain(store, "unscored", ("base", 0, 1), ("slim", 1, 2), ("base", 2, 3), embedding="base", head="base")
    with store.catalog.writing() as writer:
        writer.put_equivalences(
            [Equivalence("equivalent", ScoredRun("slim", 5, 7), ScoredRun("base", 5, 7), "probe", 0.99)]
        )
    exact = described(family, "base")
    half = half_page(store, CONFIG, ["base"])
    found = variants_in(store, exact.chain, "base", CONFIG, half, 1)
    assert [(each.variant.name, each.variant.score, each.variant.kind) for each in found] == [
        ("mixed", 0.99, "equivalent")
    ]
    assert variants_in(store, exact.chain, "base", CONFIG, half, 1, DispatchLimits(equivalent=0.995)) == ()
    blocks = {block.id: block for each in (exact, found[0]) for block in each.blocks}
    cluster = Changing(
        chains=[exact.chain],
        blocks=list(blocks.values()),
        devices=2,
        make_engine=lambda name: engine_of(family, name),
        config=ClusterConfig(devices=2, placement="partition"),
        agent_config=AgentConfig(recompute_chunk=4, fetch_window=1),
        adaptation=VariantChoice((found[0].variant,)),
    )
    for number in range(12):
        asked = SequenceRequest(
            f"s{number}", f"r{number}", "base", PROMPTS[number % 6], SAMPLING, adaptive=number % 2 == 0
        )
        cluster.ask(asked, at=(2 + number) * MS)
    cluster.run()
    cluster.expect_empty()
    wanted = {None: own_tokens(family, "base"), "mixed": own_tokens(family, "mixed")}
    assert wanted[None] != wanted["mixed"]
    served = {seq: told.last.served for seq, told in cluster.told.items()}
    assert {seq: told.tokens for seq, told in cluster.told.items()} == {
        seq: wanted[served[seq]][int(seq[1:]) % 6] for seq in served
    }
    assert (
        all(served[seq] is None for seq, one in cluster.requests.items() if not one.adaptive)
        and "mixed" in served.values()
    )
    # A direct comparison of the two models counts before the score estimated from their parts.
    with store.catalog.writing() as writer:
        writer.put_equivalences(
            [Equivalence("equivalent", ScoredRun("base", 7, 8), ScoredRun("mixed", 7, 8), "probe", 0.91)]
        )
    assert [each.variant.score for each in variants_in(store, exact.chain, "base", CONFIG, half, 1)] == [0.91]


def test_another_model_under_the_same_name_is_not_loaded_for_a_version_that_runs(family: Bench) -> None:
    engine = engine_of(family, "d0")
    family.lora("base", "three", seed=8)
    chain = described(family, "three").chain
    engine.load(chain.stage(0, 2))
    with family.store.catalog.writing() as writer:
        writer.remove_model("three")
    family.lora("base", "three", seed=9)
    with pytest.raises(NotFound, match="another version of three"):
        engine.load(chain.stage(2, 4))
    now = described(family, "three").chain
    assert now.version != chain.version
    assert engine.load(now.stage(2, 4)).name == now.stage(2, 4).id
    assert (
        engine.load(replace(chain, source="three").stage(2, 4)).name == "three[2:4]"
    )  # without a version: the model as it is now
