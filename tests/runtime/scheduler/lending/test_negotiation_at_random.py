"""Random schedules with negotiated loans, silent or restarted managers, and late heartbeats (IL-10 to IL-17)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from runtime.messages import StartMigration
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.scheduler.virtual_pool import PooledAnything


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_with_negotiated_loans(seed: int) -> None:
    one = random_schedule(seed)
    rng = random.Random(f"{seed} managers")
    for _ in range(6):
        number = rng.randrange(len(one.managers))
        begin = rng.randrange(150) * MS
        one.at(begin, lambda number=number: one.muted.add(number))
        one.at(begin + 40 * MS, lambda number=number: one.muted.discard(number))
        one.at(rng.randrange(150) * MS, lambda number=number: one.restart_manager(number))
    one.run()
    one.expect_end()


def test_schedules_with_negotiated_loans_do_have_all_of_it() -> None:
    seen: Counter[str] = Counter()
    for seed in range(24, 36):
        one = random_schedule(seed)
        one.run()
        one.expect_end()
        said = one.scheduler.state().counters
        for name in ("loans", "pool_queries", "pool_grants", "pool_denials", "preemptions", "moves"):
            seen[name] += getattr(said, name)
        seen["deaths"] += len(one.trace.named("fault"))
        assert said.loans == said.pool_grants and said.pool_denials == len(one.refused)
        assert said.pool_grants <= len(
            [each for *_, each in one.sent if isinstance(each, StartMigration) and each.loan]
        )
    assert min(seen.values()) > 0 and len(seen) == 7, seen


def random_schedule(seed: int) -> PooledAnything:
    rng = random.Random(f"{seed} heartbeats")
    return PooledAnything(
        seed=seed, lends=True, mode="negotiated", beat=10 * MS, stale=lambda: rng.choice((0, 0, 50)) * MS
    )
