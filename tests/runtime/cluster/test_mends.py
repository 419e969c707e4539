"""Creditors killed in the middle of an answer: its tokens, what is computed again, and how long that takes (IL-18).

Agents are processes, and the model is a Llama in float32: its tokens are those of transformers.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec
import pytest

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agent_process.main import Preparation
from runtime.cluster.agents.lifecycle import LifeConfig
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import ClusterConfig, EngineConfig, Placement
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.models.registry import half_page
from runtime.lending_config import LendingConfig, LoanShape, LoanShipping
from runtime.scheduler.scheduler import Scheduler
from runtime.types import SamplingParams, SequenceRequest, TraceEvent
from tests.runtime.cluster.clusters import LIMIT
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.virtual import ListTrace

#: Two layers, four tokens to a page: 80 pages of 170.
CONFIG, PAGES, CHUNK, COUNT = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4), 80, 16, 40
PROMPT = tuple(random.Random(1).choices(range(3, 90), k=300))


@dataclass
class Killing(ListTrace):
    """Kills a creditor with the token of this number, on the scheduler's thread."""

    scheduler: Scheduler | None = None
    after: int = 0
    paths: set[str] = field(default_factory=set)

    def emit(self, event: TraceEvent) -> None:
        super().emit(event)
        if self.scheduler is not None:
            self.paths |= {hop.device for each in self.scheduler._state.running.values() for hop in each.path}
        if event.ev == "token" and self.scheduler is not None and event.n == self.after:
            loan = next(iter(self.scheduler.lending.loans))
            os.kill(self.scheduler.devices[loan.creditor].facts.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Case:
    """A creditor is killed with token number `after`; the path has several devices with `placement` partition."""

    after: int
    mend: bool = True
    ship: LoanShipping = "query"
    shape: LoanShape = "tokens"
    devices: int = 4
    pages: int = PAGES
    placement: Placement = "on-demand"


CASES = (
    Case(2), Case(20, ship="pages"), Case(20, ship="cheapest"), Case(20, mend=False),
    Case(20, shape="layers"), Case(2, shape="cheapest"),
    Case(20, shape="cheapest", devices=6, pages=64, placement="partition"),
)  # fmt: skip


@contextmanager
def lending(
    bench: Bench,  # noqa: F811
    trace: ListTrace,
    case: Case,
) -> Iterator[ClusterDriver]:
    half = half_page(bench.store, CONFIG, ["long"])
    engine = replace(CONFIG, kv_cache_memory_bytes=2 * half * case.pages)
    described = describe_chain(bench.store, "long", engine, half, 1)
    settings = {
        "store": str(bench.store.root), "database": None, "config": msgspec.to_builtins(engine), "half_page": half,
        "threads": 1,
    }  # fmt: skip
    agents = AgentSettings(report_seconds=0.05, loan_seconds=5.0, loan_shipping=case.ship)
    config = ClusterConfig(
        devices=case.devices, placement=case.placement, prefill_chunk=CHUNK, prefix_caching="off",
        lending=LendingConfig("planned", 1.0, recall=1.0, mend=case.mend, shape=case.shape),
    )  # fmt: skip
    driver = ClusterDriver(
        [described.chain], described.blocks, [f"agent-{at}" for at in range(case.devices)],
        ProcessLauncher(ProcessConfig(Preparation("staged", settings), settings=agents, beat_seconds=0.1)),
        config, LifeConfig(backoff_seconds=0.05), trace=trace,
    )  # fmt: skip
    try:
        yield driver
    finally:
        assert driver.shutdown(LIMIT)


@pytest.fixture(scope="module")
def answer(bench: Bench) -> list[int]:  # noqa: F811
    bench.family(
        "llama", "long", num_hidden_layers=2, max_position_embeddings=1024, num_key_value_heads=2,
        initializer_range=0.5, seed=3,
    )  # fmt: skip
    return greedy(reference(bench.folders["long"]), PROMPT, COUNT)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_creditor_that_is_killed_costs_what_it_held(
    bench: Bench,  # noqa: F811
    answer: list[int],
    case: Case,
) -> None:
    trace, times, tokens = Killing(after=case.after), [], []
    with lending(bench, trace, case) as driver:
        trace.scheduler = driver._scheduler
        sampling = SamplingParams(COUNT, ignore_eos=True)
        for event in driver.run([SequenceRequest("a", "r", "long", PROMPT, sampling)]):
            assert event.error is None, event
            if event.token is not None:
                tokens.append(event.token)
                times.append(time.monotonic())
        counters = driver.state().counters
    assert same_tokens(reference(bench.folders["long"]), PROMPT, answer, tokens) == COUNT
    held = lost_tokens(trace, 4)
    print(f"\nRECOVERY {counters.recovery_ns / 1e6:.0f} ms, mended {counters.mended_tokens} of {held}")
    assert counters.recoveries == 1 and counters.recovery_ns < 5e9 > 1e9 * max(b - a for a, b in pairwise(times))
    if case.mend:
        assert 0 < counters.mended_tokens <= held + CHUNK and counters.mends == 1
        assert counters.loss_restarts == counters.preemptions == 0
        assert (case.placement == "partition") == (len(trace.paths) > 1)
    else:
        assert counters.loss_restarts == 1 and counters.restarted_tokens >= len(PROMPT) and not counters.mends


def lost_tokens(trace: ListTrace, page_tokens: int) -> int:
    """Return the tokens of which dead creditors held K and V, in some layers or in all, counted by hop."""
    lost = defaultdict[tuple[int, str], set[int]](set)
    for event in trace.named("kv.lost"):
        lost[event.t, event.dev] |= set(range(*event.extra["groups"]))
    return page_tokens * sum(map(len, lost.values()))
