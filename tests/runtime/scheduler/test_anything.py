"""Random schedules of everything at once (`anything`): right tokens, accounting that agrees, and no hang."""

from __future__ import annotations

import pytest

from tests.runtime.scheduler.anything import Anything


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_together(seed: int) -> None:
    cluster = Anything(seed=seed)
    cluster.run()
    cluster.expect_end()


def test_schedules_do_have_all_of_it() -> None:
    """The schedules contain what the test above is about: each event happens in at least one of them."""
    seen = dict.fromkeys(
        (
            "moves", "given up", "preempted", "predicted", "shared", "scaled", "placed", "updated", "deaths", "evicted",
            "swapped out", "swapped in", "copies lost",
        ),
        0,
    )  # fmt: skip
    for seed in range(12, 24):
        cluster = Anything(seed=seed)
        cluster.run()
        cluster.expect_end()
        scheduler, moves = cluster.scheduler, cluster.scheduler.migrations.counts()
        seen["moves"] += moves.committed
        seen["given up"] += moves.aborted
        seen["preempted"] += scheduler.state().counters.preemptions
        seen["predicted"] += scheduler.speculation.counts().started
        seen["shared"] += scheduler.sharing().matches
        seen["scaled"] += len(cluster.trace.named("scale.up"))
        seen["placed"] += len(cluster.trace.named("placement.move"))
        seen["updated"] += sum(not each.error for each in cluster.updated)
        seen["evicted"] += scheduler.state().counters.evictions
        counters = scheduler.state().counters
        seen["swapped out"] += counters.swapped_out
        seen["swapped in"] += counters.swapped_in
        seen["copies lost"] += counters.swapped_lost
        seen["deaths"] += len(cluster.trace.named("fault"))
    assert min(seen.values()) > 0, seen
