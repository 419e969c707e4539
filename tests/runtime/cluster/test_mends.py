"""Creditors killed in the middle of an answer: its tokens, what is computed again, and how long that takes (IL-18).

Agents are processes, and the model is a Llama in float32: its tokens are those of transformers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import pytest

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.config import ClusterConfig, Placement
from runtime.lending_config import LendingConfig, LoanShape, LoanShipping
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.cluster.loan_kills import (
    CHUNK,
    COUNT,
    PAGES,
    PROMPT,
    Killing,
    lending,
    lends_layers,
    lost_tokens,
    put_long,
)
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.engine.oracle import greedy, reference, same_tokens


@dataclass(frozen=True)
class Case:
    """A creditor is killed with token number `after`; the path has several devices with `placement` partition.

    Layers are lent where a device holds a whole one, of 85 pages.
    """

    after: int
    mend: bool = True
    ship: LoanShipping = "query"
    shape: LoanShape = "tokens"
    devices: int = 4
    pages: int = PAGES
    placement: Placement = "on-demand"


CASES = (
    Case(2), Case(20, ship="pages"), Case(20, ship="cheapest"), Case(20, mend=False),
    Case(20, shape="layers", pages=100), Case(2, shape="cheapest", pages=100),
    Case(20, shape="cheapest", devices=6, pages=64, placement="partition"),
)  # fmt: skip


@pytest.fixture(scope="module")
def answer(bench: Bench) -> list[int]:  # noqa: F811
    put_long(bench)
    return greedy(reference(bench.folders["long"]), PROMPT, COUNT)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_creditor_that_is_killed_costs_what_it_held(
    bench: Bench,  # noqa: F811
    answer: list[int],
    case: Case,
) -> None:
    trace, times, tokens = Killing(after=case.after), [], []
    settings = AgentSettings(report_seconds=0.05, loan_seconds=5.0, loan_shipping=case.ship)
    config = ClusterConfig(
        devices=case.devices, placement=case.placement, prefill_chunk=CHUNK, prefix_caching="off",
        lending=LendingConfig("planned", 1.0, recall=1.0, mend=case.mend, shape=case.shape),
    )  # fmt: skip
    with lending(bench, trace, config, settings, case.pages) as driver:
        sampling = SamplingParams(COUNT, ignore_eos=True)
        for event in driver.run([SequenceRequest("a", "r", "long", PROMPT, sampling)]):
            assert event.error is None, event
            if event.token is not None:
                tokens.append(event.token)
                times.append(time.monotonic())
        counters = driver.state().counters
    assert same_tokens(reference(bench.folders["long"]), PROMPT, answer, tokens) == COUNT
    assert lends_layers(trace, "a") == (case.shape != "tokens" and case.placement != "partition")
    held = lost_tokens(trace, 4)
    print(f"\nRECOVERY {counters.recovery_ns / 1e6:.0f} ms, mended {counters.mended_tokens} of {held}")
    assert counters.recoveries == 1 and counters.recovery_ns < 5e9 > 1e9 * max(b - a for a, b in pairwise(times))
    if case.mend:
        assert 0 < counters.mended_tokens <= held + CHUNK and counters.mends == 1
        assert counters.loss_restarts == counters.preemptions == 0
        assert (case.placement == "partition") == (len(trace.paths) > 1)
    else:
        assert counters.loss_restarts == 1 and counters.restarted_tokens >= len(PROMPT) and not counters.mends
