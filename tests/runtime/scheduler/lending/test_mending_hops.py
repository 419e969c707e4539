"""Paths of several hops of which a creditor has died (IL-18): what came before the hop with losses is passed again."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.lending_config import LendingConfig
from runtime.messages import MendPages, RunRows
from tests.runtime.scheduler.lending.test_lending import prompt
from tests.runtime.scheduler.lending.test_mending import CHUNK, Unaware, expect_one_mend, lost_tokens
from tests.runtime.scheduler.lending.test_shapes import SIX
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request


def over_hops(
    cut: tuple[int, ...], devices: int, tokens: int, made: type[VirtualCluster] = VirtualCluster, **changes: Any
) -> VirtualCluster:
    """Return six layers on a path of several devices that hold 40 pages each, and a request that is too long for it."""
    lending = LendingConfig("planned", recall=1.0, cut_tokens=1, **changes)
    config = ClusterConfig(devices=devices, placement="partition", prefill_chunk=CHUNK, lending=lending)
    one = made(
        [SIX], [cut], devices=devices, pages=40, config=config,
        make_engine=lambda name: IntegerEngine([SIX], 40, device=name, rewrites=True),
    )  # fmt: skip
    one.ticks(MS, 900 * MS)
    one.ask(request("a", prompt(tokens), "m", max_tokens=30, ignore_eos=True))
    return one


def creditors(one: VirtualCluster) -> list[str]:
    return sorted({loan.creditor for loan in one.scheduler.lending.loans})


@pytest.mark.parametrize(("cut", "devices", "tokens"), [((3,), 5, 60), ((2,), 5, 45), ((2, 4), 7, 100)])
def test_paths_of_several_hops_are_mended(cut: tuple[int, ...], devices: int, tokens: int) -> None:
    """Hops before the one with losses are passed again; what they have stays. Those behind it are not."""
    seen: Counter[str] = Counter()
    for at in range(30, 330, 15):
        one = over_hops(cut, devices, tokens)
        rng = random.Random(at)
        one.at(at * MS, lambda one=one, rng=rng: [one.kill(rng.choice(some)) for some in [creditors(one)] if some])
        expect_one_mend(one)
        mends = [each for _, _, to, each in one.sent if isinstance(each, MendPages)]
        seen.update(f"hops {len(each.path)}" for each in mends)
    assert seen[f"hops {len(cut) + 1}"], seen


@pytest.mark.parametrize(("cut", "tokens"), [((3,), 60), ((2, 4), 100)])
def test_a_row_that_failed_at_a_later_hop_is_sent_again_over_all_hops(cut: tuple[int, ...], tokens: int) -> None:
    """Hops that had run it write its positions again."""
    again = 0
    for at in range(40, 300, 13):
        one = over_hops(cut, 7, tokens, made=Unaware)
        rng = random.Random(at)
        one.at(at * MS, lambda one=one, rng=rng: [one.kill(rng.choice(some)) for some in [creditors(one)] if some])
        one.run()
        one.expect()
        counters = one.scheduler.state().counters
        assert counters.preemptions == counters.loss_restarts == 0
        assert counters.mends == (lost_tokens(one) > 0)
        again += sum(sum(message.attempts) > 0 for _, _, _, message in one.sent if isinstance(message, RunRows))
    assert again > 4


def test_creditors_of_several_hops_die_one_after_the_other() -> None:
    mended = 0
    for seed in range(30):
        rng = random.Random(seed)
        one = over_hops((2, 4), 7, 100)

        def kill(one: VirtualCluster = one, rng: random.Random = rng) -> None:
            if some := creditors(one):
                one.kill(rng.choice(some))

        first = rng.randrange(60, 300) * MS
        one.at(first, kill)
        one.at(first + rng.randrange(15 * MS), kill)
        one.run()
        one.expect()
        counters = one.scheduler.state().counters
        assert counters.loss_restarts == 0 and counters.mended_tokens <= lost_tokens(one) + 2 * CHUNK
        mended += counters.mends
    assert mended > 10


@pytest.mark.parametrize("victim", ["d0", "d1", "d2"])
def test_a_device_of_the_path_dies_while_it_is_mended(victim: str) -> None:
    plain = over_hops((2, 4), 7, 100)
    plain.at(150 * MS, lambda: plain.kill(creditors(plain)[0]))
    plain.run()
    begun = [event.t for event in plain.trace.named("kv.mend.start")]
    assert begun
    for at in sorted({time + shift * MS // 2 for time in begun[:3] for shift in range(5)}):
        one = over_hops((2, 4), 7, 100)
        one.at(150 * MS, lambda one=one: one.kill(creditors(one)[0]))
        one.at(at, lambda one=one: one.kill(victim))
        one.run()
        one.expect()
