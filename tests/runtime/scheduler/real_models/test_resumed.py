"""Real models go on behind tokens produced before: greedy and drawn, with penalties, on one device and on two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from runtime.config import ClusterConfig, EngineConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.oracle import reference, same_tokens
from tests.runtime.engine.test_equality import prompts
from tests.runtime.scheduler.virtual_cluster import VirtualCluster

CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4)
COUNT = 9
GREEDY = SamplingParams(COUNT, ignore_eos=True)
SAMPLINGS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(COUNT, temperature=0.9, top_p=0.95, top_k=40, seed=7, ignore_eos=True),
    "penalties": SamplingParams(
        COUNT, temperature=0.7, seed=11, repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.8,
        ignore_eos=True,
    ),
    "greedy-penalties": replace(GREEDY, repetition_penalty=1.5, frequency_penalty=1.0),
}  # fmt: skip
(PROMPT,) = prompts(5, (13,))


@pytest.fixture(scope="module")
def family(bench: Bench) -> Bench:  # noqa: F811
    bench.family("llama", "llama", num_hidden_layers=3, num_key_value_heads=2, seed=1)
    bench.family("llama", "half", num_hidden_layers=3, num_key_value_heads=2, seed=1, dtype="bfloat16")
    return bench


def answers(family: Bench, model: str, devices: int, asked: Sequence[SequenceRequest]) -> dict[str, list[int]]:
    """Return each sequence's tokens, those that it arrived with included."""
    half = half_page(family.store, CONFIG, [model])
    described = describe_chain(family.store, model, CONFIG, half, 1)
    cluster: Any = VirtualCluster(
        chains=[described.chain],
        blocks=described.blocks,
        devices=devices,
        make_engine=lambda name: StagedEngine(family.store, CONFIG, half, name),
        config=ClusterConfig(devices=devices, placement="partition"),
    )
    cluster.ask(*asked)
    cluster.run()
    cluster.expect_empty()
    return {seq: told.tokens for seq, told in cluster.told.items()}


@pytest.mark.parametrize("devices", [1, 2])
def test_every_cut_gives_the_same_tokens(family: Bench, devices: int) -> None:
    for name, sampling in SAMPLINGS.items():
        whole = SequenceRequest("whole", "r", "llama", PROMPT, sampling)
        answer = answers(family, "llama", devices, [whole])["whole"]
        cuts = [replace(whole, seq=f"{at}", output=tuple(answer[:at])) for at in range(COUNT)]
        for seq, tokens in answers(family, "llama", devices, cuts).items():
            assert tokens == answer, f"{name}, cut at {seq}"


@pytest.mark.parametrize("devices", [1, 2])
def test_in_half_precision_only_ties_differ(family: Bench, devices: int) -> None:
    stock = reference(family.folders["half"])
    whole = SequenceRequest("whole", "r", "half", PROMPT, GREEDY)
    answer = answers(family, "half", devices, [whole])["whole"]
    cuts = [replace(whole, seq=f"{at}", output=tuple(answer[:at])) for at in range(COUNT)]
    agreed = [same_tokens(stock, PROMPT, answer, tokens) for tokens in answers(family, "half", devices, cuts).values()]
    assert sum(agreed) > COUNT * COUNT // 2
