"""Backfill in a virtual cluster: short sequences run while the first waiting one lacks pages, which starts no later."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.config import ClusterConfig, OrderConfig, Plan
from runtime.engine.fakes.integer_model import counting_model
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1* 2", max_model_len=1024)


def starts(plan: Plan, backfill: bool, short: int = 10, strict: bool = False) -> tuple[dict[str, float], int]:
    """Return when each sequence started, in ms, and how many were let pass.

    After some have been learned from, one runs and holds a third of the pages. A large prompt waits for its end; behind
    it wait three answers of `short` tokens.
    """
    order = OrderConfig(plan, backfill=backfill, strict=strict, evict=False, cap_batches=False)
    config = ClusterConfig(max_num_seqs=4, order=order, prefix_caching="off")
    made = VirtualCluster([M], devices=1, pages=200, config=config, costs=lambda plan: MS, latency=MS // 100)

    def ask(seq: str, prompt: int, tokens: int, at: int) -> None:
        one = request(seq, [number % 7 for number in range(prompt)], "m", max_tokens=tokens, ignore_eos=True)
        made.ask(replace(one, arrival=at, slo_ms=100_000), at=at)

    for number in range(8):
        ask(f"warm{number}", 8, 10, number * 30 * MS)
    ask("long", 280, 100, 300 * MS)
    ask("large", 560, 4, 320 * MS)
    for number in range(3):
        ask(f"short{number}", 8, short, (330 + number) * MS)
    made.ticks(10 * MS, 2000 * MS)
    made.run(until=2000 * MS)
    made.expect()
    found = {each.seq: each.t / MS for each in made.trace.named("batch.insert")}
    return found, made.scheduler.state().counters.backfilled


@pytest.mark.parametrize("plan", ["edf", "qlm"])
def test_short_ones_run_before_a_large_prompt_which_starts_no_later(plan: Plan) -> None:
    (waiting, none), (found, passed) = starts(plan, backfill=False), starts(plan, backfill=True)
    assert none == 0 and passed == 3
    assert all(waiting[f"short{number}"] >= waiting["large"] > 390 for number in range(3))
    assert all(found[f"short{number}"] < 360 for number in range(3))
    assert found["large"] <= waiting["large"] + 3  # each of their prompts takes a step of 1 ms


def test_one_that_would_run_longer_than_the_large_prompt_waits_is_not_let_pass() -> None:
    found, passed = starts("edf", backfill=True, short=400)
    assert passed == 0 and all(found[f"short{number}"] >= found["large"] for number in range(3))


def test_a_strict_order_lets_none_pass() -> None:
    assert starts("edf", backfill=True, strict=True)[1] == 0
