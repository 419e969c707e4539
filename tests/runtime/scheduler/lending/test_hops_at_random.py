"""Random schedules of loans on paths of two and three hops, with deaths of creditors and of other devices (IL-18).

`BLOCKZOO_SCHEDULES=1000` runs as many; by default ten.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.lending_config import LendingConfig
from runtime.messages import MendPages, RunRows
from tests.runtime.scheduler.lending.test_lending import prompt
from tests.runtime.scheduler.lending.test_mending import Unaware
from tests.runtime.scheduler.lending.test_shapes import SIX
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

COUNT = int(os.environ.get("BLOCKZOO_SCHEDULES", "10"))


def schedule(seed: int) -> VirtualCluster:
    """Return a path of two or three hops that long requests do not fit, and what happens to them."""
    rng = random.Random(f"{seed} hops")
    cut = rng.choice(((3,), (2, 4)))
    devices, pages = len(cut) + 1 + rng.choice((2, 3, 4)), rng.choice((40, 44, 60))
    lending = LendingConfig(
        "planned", recall=rng.choice((0.25, 1.0)), shape=rng.choice(("tokens", "cheapest")), cut_tokens=1
    )
    config = ClusterConfig(
        devices=devices, placement="partition", prefill_chunk=rng.choice((4, 8, 16)), lending=lending,
        prefix_caching=rng.choice(("off", "cached")), max_crashes=99,
    )  # fmt: skip
    made = rng.choice((VirtualCluster, VirtualCluster, Unaware))
    one = made(
        [SIX], [cut], devices=devices, pages=pages, config=config, restart=rng.choice((10, 50)) * MS,
        make_engine=lambda name: IntegerEngine([SIX], pages, device=name, rewrites=True),
    )  # fmt: skip
    if slow := rng.choice((0, 0, MS // 2, 3 * MS)):  # a row may be faster over a hop than an order of the scheduler
        one.delay = lambda: rng.randrange(slow)
    for number in range(rng.randrange(1, 5)):
        asked = request(
            f"s{number}", prompt(rng.randrange(20, 70), rng.randrange(2)), "m", max_tokens=rng.randrange(4, 30),
            ignore_eos=True,
        )  # fmt: skip
        one.ask(asked, at=rng.randrange(60 * MS))
        if rng.random() < 0.15:
            one.abort(asked.seq, rng.randrange(200 * MS))
            del one.requests[asked.seq]

    def kill() -> None:
        loans = list(one.scheduler.lending.loans)
        name = rng.choice(loans).creditor if loans and rng.random() < 0.8 else f"d{rng.randrange(devices)}"
        if one.nodes[name].alive and rng.random() < 0.7:
            one.kill(name)

    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(10 * MS, 250 * MS)
        one.at(at, kill)
        one.at(at + rng.randrange(12 * MS), kill)
    one.ticks(2 * MS, 1200 * MS)
    return one


@pytest.mark.parametrize("part", range(10))
def test_whatever_happens_over_several_hops(part: int) -> None:
    for seed in range(part, COUNT, 10):
        one = schedule(seed)
        one.run()
        one.expect()


def test_schedules_over_several_hops_have_mends_of_each() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100, 130):
        one = schedule(seed)
        one.run()
        one.expect()
        seen["mends"] += one.scheduler.state().counters.mends
        for _, _, _, message in one.sent:
            if isinstance(message, MendPages):
                seen[f"hops {len(message.path)}"] += 1
            seen["sent again"] += isinstance(message, RunRows) and any(message.attempts)
    assert min(seen.values()) > 1 and len(seen) == 5, seen
