"""Page sets that a device that decodes has already are shared there, and only the rest is taken and sent (TI-15).

Another prompt with the same prefix was handed to it before, and decodes still or is in the prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from runtime.config import PrefixCaching
from runtime.control.scheduler_io import Tick
from runtime.decode_config import DecodeConfig, HandoffGrain
from runtime.messages import MigrationFailed, PageData, StartMigration
from runtime.policy.kv.duplicates import PERIOD
from runtime.role_config import RoleName
from runtime.types import SequenceRequest
from tests.runtime.scheduler.handoff.apart import Apart, run_disturbed
from tests.runtime.scheduler.handoff.test_handoffs import PAIR, moves, reach
from tests.runtime.scheduler.handoff.test_layer_grain import SHAPES
from tests.runtime.scheduler.kv.test_sharing import alike
from tests.runtime.scheduler.test_scheduler import N
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

#: Tokens of three page sets, which prompts share.
SYSTEM = (7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9)
#: From then on all stages are loaded.
READY = 20 * MS
GRAINS: Sequence[HandoffGrain] = ("request", "chunk", "layer")


def sharing(
    *roles: RoleName, caching: PrefixCaching = "cached", grain: HandoffGrain = "request", **changes: Any
) -> Apart:
    settings = {
        "prefix_caching": caching, "decode": DecodeConfig(grain=grain), "prefill_chunk": 8,
        **changes.pop("settings", {}),
    }  # fmt: skip
    return Apart(*roles, settings=settings, **{"pages": 4000, **changes})


def like(seq: str, own: int, answer: int = 6, tokens: int = 7, **changes: Any) -> SequenceRequest:
    """Return a request for n that begins with SYSTEM, with tokens of its own behind it."""
    one = request(seq, (*SYSTEM, *range(own, own + tokens)), "n", max_tokens=answer)
    return replace(one, **changes)


def ran(cluster: Apart, seq: str, at: int = READY) -> None:
    """Run a request to its end, so that its prefix is in the cache."""
    cluster.ask(like(seq, 20), at=at)
    cluster.run()


def sent(cluster: Apart, seq: str) -> set[int]:
    """Return the tokens of which pages were sent for a sequence."""
    found = (each for *_, each in cluster.sent if isinstance(each, PageData) and not each.error and each.seq == seq)
    return {token for each in found for token in range(each.lo, each.hi)}


def present(cluster: Apart) -> int:
    return cluster.scheduler.state().counters.handoff_present_tokens


def expect_sent(cluster: Apart, shared: int) -> None:
    """Assert that all bytes are those of all prompts, but for so many tokens that were there."""
    counters = cluster.scheduler.state().counters
    assert counters.handoff_present_tokens == shared
    assert counters.handoff_bytes == sum(map(cluster.kv_bytes, cluster.handed_off())) - cluster.shared_bytes()
    assert cluster.shared_bytes() == shared // 4 * N.spec.kv_layers * cluster.nodes["d0"].engine.page_bytes


@pytest.mark.parametrize("caching", ["active", "cached"])
@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize(("roles", "placement"), SHAPES)
def test_the_first_hand_off_sends_all_and_later_ones_only_the_rest(
    roles: Sequence[RoleName], placement: str, grain: HandoffGrain, caching: PrefixCaching
) -> None:
    cluster = sharing(*roles, caching=caching, grain=grain, settings={"placement": placement})
    cluster.ask(like("a", 20, answer=60), at=READY)
    reach(cluster, lambda: len(cluster.told["a"].tokens) > 2)
    if caching == "cached":
        cluster.run()
    paths = {hop.device for one in cluster.scheduler.sequences.values() for hop in one.path}
    cluster.ask(like("b", 40), like("c", 60, tokens=8), at=cluster.now)
    cluster.run()
    cluster.expect()
    cluster.expect_phases()
    assert sent(cluster, "a") == set(range(19))
    if placement == "partition" or roles == PAIR:
        assert sent(cluster, "b") == set(range(12, 19)) and sent(cluster, "c") == set(range(12, 20))
        expect_sent(cluster, 24)
    else:  # two devices that decode: those that go to the other one take all with them
        assert paths or caching == "cached"
        expect_sent(cluster, present(cluster))
    assert cluster.scheduler.state().counters.handoffs == 3


@pytest.mark.parametrize("how", ["off", "tenants", "models"])
def test_nothing_is_shared_where_it_may_not_be(how: str) -> None:
    cluster = sharing(*PAIR, caching="off" if how == "off" else "cached")
    ran(cluster, "a")
    changes = {"off": {}, "tenants": {"tenant": "other"}, "models": {"model": "m"}}[how]
    cluster.ask(like("b", 40, **changes), at=cluster.now)
    cluster.run()
    cluster.expect()
    assert sent(cluster, "b") == set(range(19)) and present(cluster) == 0


def test_only_what_is_missing_is_taken() -> None:
    """Pages of the prefix are counted once, also while it is handed off."""
    cluster = sharing(*PAIR, caching="active", page_bytes_per_ms=20.0)
    cluster.ask(like("a", 20, answer=90), at=READY)
    reach(cluster, lambda: len(cluster.told["a"].tokens) > 2)
    cluster.scheduler.sequences["a"].pause(cluster.now)
    reach(cluster, lambda: not cluster.scheduler.sequences["a"].flying)
    pages, layers = cluster.scheduler.devices["d1"].pages, N.spec.kv_layers
    before = pages.used
    cluster.ask(like("b", 40), at=cluster.now)
    reach(cluster, lambda: moves(cluster))
    assert pages.used - before == 2 * layers
    reach(cluster, lambda: not moves(cluster))
    assert pages.used == before + 2 * layers == pages.capacity - cluster.nodes["d1"].agent.pages().free
    cluster.scheduler.sequences["a"].pause(None)
    cluster.scheduler._state.ready.append(cluster.scheduler.sequences["a"])
    cluster.tell(Tick())
    cluster.run()
    cluster.expect()


@pytest.mark.parametrize("grain", ["chunk", "layer"])
def test_chunks_that_are_there_are_not_asked_for(grain: HandoffGrain) -> None:
    """The device that decodes has more of the prompt than is computed when its hand-off begins."""
    cluster = sharing(*PAIR, grain=grain, settings={"prefill_chunk": 4})
    ran(cluster, "a")
    for prefix in [each for each in cluster.scheduler.prefix_cache if each.path[0].device == "d0"]:
        cluster.scheduler.prefix_cache.remove_prefix(prefix.name)  # so that the prompt is computed from its beginning
    cluster.tell(Tick())
    cluster.ask(like("b", 40), at=cluster.now)
    cluster.run()
    cluster.expect()
    sent_to = [each for *_, each in cluster.sent if isinstance(each, StartMigration) and each.seq == "b"]
    orders = [each.upto for each in sent_to]
    assert not sent_to[0].as_written, "all that is asked for first is there"
    assert orders[0] == 12 and sorted(set(orders)) == orders and orders[-1] == 19
    assert {start for device, seq, start, _ in cluster.ran if seq == "b" and device == "d0"} >= {0, 4, 8}
    assert sent(cluster, "b") == set(range(12, 19))


def test_a_prompt_that_is_there_as_a_whole_is_handed_off_without_a_byte() -> None:
    cluster = sharing(*PAIR)
    for name in "ab":
        cluster.ask(like(name, 20, tokens=8), at=max(cluster.now, READY))
        cluster.run()
    cluster.expect()
    assert present(cluster) == 20 and sent(cluster, "b") == set()


def test_a_page_set_that_it_has_not_computed_is_not_shared() -> None:
    """The device has the fifth page set, too, with the first token of the same answer."""
    cluster = sharing(*PAIR)
    for name in "ab":
        cluster.ask(like(name, 20), at=max(cluster.now, READY))
        cluster.run()
    cluster.expect()
    assert cluster.told["a"].tokens == cluster.told["b"].tokens and present(cluster) == 16


def test_what_is_shared_is_not_evicted_for_the_rest() -> None:
    """It is the least recently used prefix, with page sets behind those that are shared."""
    layers = N.spec.kv_layers
    cluster = sharing(*PAIR, pages=18 * layers, settings={"watermark": 0.0})
    ran(cluster, "a")
    cluster.ask(request("x", range(50, 73), "n", max_tokens=10), at=cluster.now)
    cluster.run()
    assert cluster.scheduler.devices["d1"].pages.idle == 14 * layers
    cluster.ask(like("b", 40, tokens=16), at=cluster.now)
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.prefix_cache.counts().evicted >= 1
    assert present(cluster) == 12 and cluster.scheduler.state().counters.handoffs_aborted == 0


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("end", ["evicted", "ended", "aborted"])
def test_what_is_there_stays_until_it_is_adopted(end: str, grain: HandoffGrain) -> None:
    """Its donor goes between the reservation and the commit, and other sequences take all free pages."""
    cluster = sharing(*PAIR, caching="cached" if end == "evicted" else "active", grain=grain, page_bytes_per_ms=20.0)
    cluster.ask(like("a", 20, answer=30 if end == "ended" else 60), at=READY)
    reach(cluster, lambda: len(cluster.told["a"].tokens) > 2)
    if end == "evicted":
        cluster.run()
    cluster.ask(like("b", 40, tokens=40), at=cluster.now)
    reach(cluster, lambda: any(move.sequence.seq == "b" and move.there.groups == 3 for move in moves(cluster)))
    if end == "evicted":
        cluster.scheduler.prefix_cache.clear()
    elif end == "aborted":
        cluster.abort("a", cluster.now)
        del cluster.requests["a"]
    else:
        reach(cluster, lambda: "a" not in cluster.scheduler.sequences)
    cluster.tell(Tick())
    assert moves(cluster)
    for at in range(6):  # they write into whatever is free
        cluster.ask(request(f"x{at}", range(50 + at, 70 + at), "m", max_tokens=3), at=cluster.now)
    cluster.run()
    cluster.expect()
    assert sent(cluster, "b") == set(range(12, 52)) and present(cluster) == 12


def test_a_prefix_that_is_not_there_any_more_is_sent_as_all_else() -> None:
    """The scheduler takes an agent's word for it: it drops the prefix, and begins again."""
    cluster = sharing(*PAIR)
    ran(cluster, "a")
    (prefix,) = [each for each in cluster.scheduler.prefix_cache if each.path[0].device == "d1"]
    cluster.nodes["d1"].agent._sequence_table.close(prefix.name, 1)
    cluster.ask(like("b", 40), at=cluster.now)
    cluster.run()
    assert [each.reason for *_, each in cluster.sent if isinstance(each, MigrationFailed)]
    counters = cluster.scheduler.state().counters
    assert (counters.handoffs, counters.handoffs_aborted) == (2, 1)
    assert sent(cluster, "b") == set(range(19)) and prefix.name not in cluster.scheduler.prefix_cache
    cluster.expect()


def test_prefixes_of_both_sides_are_no_duplicates() -> None:
    """Neither goes once a minute because the other one has it, too: the one spares computing, the other sending."""
    cluster = sharing(*PAIR)
    ran(cluster, "a")
    cluster.at(cluster.now + 2 * PERIOD, lambda: cluster.tell(Tick()))
    cluster.run()
    assert {each.path[0].device for each in cluster.scheduler.prefix_cache} == {"d0", "d1"}


def test_of_equally_loaded_paths_the_one_that_has_it_is_taken() -> None:
    """Also if it is not the first one; but not if a sequence runs there already."""
    cluster = sharing("prefill", "decode", "decode")
    for at in range(8):  # all load what they run
        cluster.ask(request(f"w{at}", range(60 + at, 70 + at), "mn"[at % 2], max_tokens=20), at=at * READY)
    cluster.run()
    cluster.ask(request("x", range(50, 60), "m", max_tokens=60), at=cluster.now)
    reach(cluster, lambda: len(cluster.told["x"].tokens) > 2)
    assert cluster.scheduler.sequences["x"].path[0].device == "d1"
    cluster.ask(like("a", 20), at=cluster.now)
    cluster.run()
    for name, taken in (("b", "d2"), ("c", "d1")):
        if name == "c":
            cluster.ask(request("y", (*SYSTEM, *range(9)), "n", max_tokens=60), at=cluster.now)
            reach(cluster, lambda: len(cluster.told["y"].tokens) > 2)
            assert cluster.scheduler.sequences["y"].path[0].device == "d2"
        cluster.ask(like(name, 40), at=cluster.now)
        reach(cluster, lambda name=name: len(cluster.told[name].tokens) > 2)
        assert cluster.scheduler.sequences[name].path[0].device == taken
        cluster.run()
    assert present(cluster) == 24
    cluster.expect()


@pytest.mark.parametrize("caching", ["active", "cached"])
def test_room_is_needed_only_for_what_is_missing(caching: PrefixCaching) -> None:
    """Two prompts for which there would be no room, had each its own pages."""
    layers = N.spec.kv_layers
    cluster = sharing(*PAIR, caching=caching, pages=9 * layers + 1, settings={"watermark": 0.0})
    cluster.ask(like("a", 20, answer=4), at=READY)
    reach(cluster, lambda: len(cluster.told["a"].tokens) > 1)
    cluster.scheduler.sequences["a"].pause(cluster.now)
    cluster.ask(like("b", 40, answer=4), at=cluster.now)
    reach(cluster, lambda: len(cluster.told["b"].tokens) > 1)
    a, b = (cluster.scheduler.sequences[name] for name in "ab")
    assert a.path == b.path and a.pages.groups + b.pages.groups > 9
    assert cluster.scheduler.devices["d1"].pages.used == (a.pages.groups + b.pages.groups - 3) * layers
    cluster.scheduler.sequences["a"].pause(None)
    cluster.scheduler._state.ready.append(cluster.scheduler.sequences["a"])
    cluster.tell(Tick())
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.preemptions == 0


def test_a_prefix_whose_end_is_in_the_way_is_given_up() -> None:
    """A cached prefix fills the device: with it there is no room for the rest."""
    layers = N.spec.kv_layers
    cluster = sharing(*PAIR, pages=14 * layers, settings={"watermark": 0.0})
    cluster.ask(like("a", 20, answer=30), at=READY)
    cluster.run()
    assert cluster.scheduler.devices["d1"].pages.idle == 12 * layers
    cluster.ask(like("b", 40, tokens=33), at=cluster.now)
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.handoffs == 2 and present(cluster) == 0


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("victim", ["d0", "d1", "d2", "abort"])
@pytest.mark.parametrize("events", [0, 3, 9, 20])
def test_deaths_and_aborts_amid_it_leave_no_page(grain: HandoffGrain, victim: str, events: int) -> None:
    roles: tuple[RoleName, ...] = ("prefill", "decode", "decode")
    cluster = sharing(*roles, grain=grain, page_bytes_per_ms=100.0, settings={"placement": "partition"})
    ran(cluster, "a")
    cluster.ask(like("b", 40, tokens=30), like("c", 30), at=cluster.now)
    reach(cluster, lambda: any(move.there.groups for move in moves(cluster)))
    for _ in range(events):
        cluster.run_one()
    if victim == "abort":
        cluster.abort("b", cluster.now)
        del cluster.requests["b"]
    else:
        cluster.kill(victim)
    cluster.run()
    cluster.expect()


@pytest.mark.parametrize("seed", range(24))
def test_shared_prefixes_at_random_with_deaths_aborts_and_short_pages(seed: int) -> None:
    rng = random.Random(seed)
    roles, placement = rng.choice(SHAPES)
    cluster = sharing(
        *roles, caching=rng.choice(("active", "cached")), grain=rng.choice(GRAINS), pages=rng.choice((70, 120, 400)),
        page_bytes_per_ms=rng.choice((1e9, 200.0, 30.0)), latency=rng.choice((MS // 100, MS // 10, MS // 2)),
        damage=rng.choice((lambda pages: False, lambda pages: rng.random() < 0.1)),
        settings={
            "prefill_order": rng.choice(("off", "sjf")), "placement": placement,
            "prefill_chunk": rng.choice((4, 6, 64)),
            "decode": DecodeConfig(grain=rng.choice(GRAINS), until_handoff=rng.choice(("rest", "decode"))),
        },
    )  # fmt: skip
    run_disturbed(cluster, alike(30, rng), len(roles), rng)


def test_random_schedules_do_share_at_hand_offs() -> None:
    found = 0
    for seed in range(6):
        cluster = sharing("prefill", "decode", grain=GRAINS[seed % 3], pages=200)
        run_disturbed(cluster, alike(30, random.Random(seed)), 2, random.Random(seed))
        found += present(cluster) > 0
    assert found == 6
