"""Random schedules of everything (`anything`), with roles: right tokens, books that agree, no hang (TI-19).

`BLOCKZOO_SCHEDULES=10000` runs as many; by default eight. `BLOCKZOO_GRAIN=layer` hands off by layer in all of them.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.runtime.scheduler.anything import Anything

COUNT = int(os.environ.get("BLOCKZOO_SCHEDULES", "8"))
#: Schedules in which K and V in host memory were counted twice once their copy had failed.
FOUND = (1288, 2542)


@pytest.mark.parametrize("seed", (*range(COUNT), *FOUND))
def test_whatever_happens_with_roles(seed: int) -> None:
    cluster = Anything(seed=seed, apart=True)
    cluster.run()
    cluster.expect_end()


def test_schedules_with_roles_do_have_all_of_it() -> None:
    seen: Counter[str] = Counter()
    for seed in range(24, 36):
        cluster = Anything(seed=seed, apart=True)
        cluster.run()
        cluster.expect_end()
        counters = cluster.scheduler.state().counters
        seen["handed off"] += counters.handoffs
        seen["given up"] += counters.handoffs_aborted
        seen["preempted"] += counters.preemptions
        seen["shared"] += counters.shared
        seen["swapped in"] += counters.swapped_in
        seen["deaths"] += len(cluster.trace.named("fault"))
        seen["balanced"] += counters.moves - counters.handoffs
        seen["remainders"] += counters.local_prefills
        seen["present"] += counters.handoff_present_tokens
    assert min(seen.values()) > 0 and len(seen) == 9, seen
