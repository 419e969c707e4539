"""Prompts of 32,000 tokens over devices that hold a part of them: transformers' tokens, and what goes over the link.

The model has two layers and one head of K and V, 256 bytes a token; the device with its weights holds 1 MiB of the
8 MiB that a prompt needs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from runtime.chains import Array
from runtime.config import ClusterConfig, EngineConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.models.registry import half_page
from runtime.lending_config import LendingConfig, LendingMode, LoanShape
from runtime.loans import LoanQuery
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.scheduler.virtual_cluster import VirtualCluster
from tests.runtime.scheduler.virtual_loans import DirectLink
from zoo.errors import NotFound

MIB = 1 << 20
CONFIG = EngineConfig(kv_cache_memory_bytes=MIB, page_tokens=64)


class WithoutWeights(StagedEngine):
    """The engine of a device that can load nothing."""

    def load(self, stage: Any) -> Any:
        raise NotFound(f"{stage.id} is not here")


class CountingLink(DirectLink):
    """A link that records the bytes of queries and answers of single tokens, by tokens of the loans behind them."""

    found: ClassVar[dict[int, int]] = {}

    def send_query(self, creditor: str, query: LoanQuery, arrays: tuple[Array, ...]) -> int:
        ticket = super().send_query(creditor, query, arrays)
        if query.counts == (1,):
            both = (*arrays, *self.collect(ticket))
            self.found[sum(query.tokens[0])] = sum(memoryview(each.data).nbytes for each in both)
        return ticket


@pytest.fixture(scope="module")
def model(bench: Bench) -> Bench:  # noqa: F811
    small = dict(
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.5,
    )
    bench.family("llama", "long", num_hidden_layers=2, max_position_embeddings=32_768, seed=3, **small)
    return bench


@pytest.fixture(scope="module")
def answer(model: Bench) -> tuple[list[int], list[int]]:
    """A prompt of 32,000 tokens, and 64 tokens of `generate`."""
    rng = random.Random(1)
    prompt = [rng.randrange(3, 90) for _ in range(32_000)]
    return prompt, greedy(reference(model.folders["long"]), prompt, 64)


def cluster_of(
    bench: Bench,  # noqa: F811
    mib: Sequence[int],
    mode: LendingMode = "planned",
    shape: LoanShape = "cheapest",
) -> VirtualCluster:
    half = half_page(bench.store, CONFIG, ["long"])
    described = describe_chain(bench.store, "long", CONFIG, half, 1)
    pools = {f"d{at}": replace(CONFIG, kv_cache_memory_bytes=size * MIB) for at, size in enumerate(mib)}
    return VirtualCluster(
        chains=[described.chain],
        blocks=described.blocks,
        devices=len(mib),
        make_engine=lambda name: (StagedEngine if name == "d0" else WithoutWeights)(
            bench.store, pools[name], half, name
        ),
        config=ClusterConfig(
            devices=len(mib), placement="on-demand", prefill_chunk=512, lending=LendingConfig(mode, shape=shape),
            prefix_caching="off",
        ),
    )  # fmt: skip


def ask(cluster: VirtualCluster, prompt: Sequence[int], count: int) -> None:
    sampling = SamplingParams(count, ignore_eos=True)
    cluster.ask(SequenceRequest("a", "r-a", "long", tuple(prompt), sampling))
    cluster.run()


@pytest.mark.parametrize(("mib", "shape"), [((1, 8), "layers"), ((1, 4, 4), "layers"), ((1, 3, 3, 3), "tokens")])
def test_prompts_of_32000_tokens(
    model: Bench, answer: tuple[list[int], list[int]], mib: Sequence[int], shape: LoanShape
) -> None:
    prompt, expected = answer
    cluster = cluster_of(model, mib, shape=shape)
    ask(cluster, prompt, 64)
    told, counters = cluster.told["a"], cluster.scheduler.state().counters
    assert told.last.finish == "length", told.last
    assert same_tokens(reference(model.folders["long"]), prompt, expected, told.tokens) == 64
    assert {event.dev for event in cluster.trace.named("kv.lend")} == {f"d{at}" for at in range(1, len(mib))}
    assert counters.loan_bytes > 6 * MIB and counters.failed_steps == counters.preemptions == 0


def test_without_lending_the_error_names_both_sizes(model: Bench, answer: tuple[list[int], list[int]]) -> None:
    cluster = cluster_of(model, (1, 8), "off")
    ask(cluster, answer[0], 64)
    assert cluster.told["a"].last.error == "its 32000 tokens need 1002 pages on d0, which has 128"


def test_bytes_of_a_query_do_not_depend_on_the_tokens_behind_it(
    model: Bench, answer: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per row and layer: two heads of 16 float32 there, of 16 float64 with a sum and an exponent back (IL-27)."""
    monkeypatch.setattr("tests.runtime.scheduler.virtual_loans.DirectLink", CountingLink)
    for tokens in (4_100, 21_000):
        ask(cluster_of(model, (1, 8), shape="tokens"), answer[0][:tokens], 4)
    assert min(CountingLink.found) < 1_024 and max(CountingLink.found) > 16_384
    assert set(CountingLink.found.values()) == {2 * 16 * 4 + 2 * (16 + 2) * 8}
