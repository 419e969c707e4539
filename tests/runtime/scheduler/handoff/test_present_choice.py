"""Of nearly equally good paths a sequence decodes on the one that has most of its K and V (TI-14, `present_margin`)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from runtime.config import PrefixCaching
from runtime.control.scheduler_io import Tick
from runtime.decode_config import DecodeConfig, DecodeRule, ReserveRule
from runtime.types import SequenceRequest
from tests.runtime.scheduler.handoff.apart import Apart, run_disturbed
from tests.runtime.scheduler.handoff.test_handoffs import reach
from tests.runtime.scheduler.handoff.test_present_pages import SYSTEM, present
from tests.runtime.scheduler.kv.test_sharing import alike
from tests.runtime.scheduler.test_scheduler import N
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

RULES: tuple[DecodeRule, ...] = ("po2", "least", "load")


def loaded(choice: DecodeRule, devices: int = 4, caching: PrefixCaching = "cached", **decode: Any) -> Apart:
    """Return a cluster with devices that decode and have loaded N; nothing runs there."""
    config = DecodeConfig(choice=choice, heavy_tokens=20, **decode)
    settings = {"placement": "replicate", "prefix_caching": caching, "decode": config, "watermark": 0.0}
    cluster = Apart("prefill", *["decode"] * devices, models=(N,), cuts=[(1, 3, 4)], settings=settings, pages=4000)
    for at in range(6 * devices):
        cluster.ask(lasting(f"w{at}", [60 + at] * 3, 20), at=at * MS)
    cluster.run()
    assert {device for device, *_ in cluster.ran} == {f"d{at}" for at in range(devices + 1)}
    return cluster


def lasting(seq: str, prompt: Iterable[int], tokens: int) -> SequenceRequest:
    """Return a request of which the length of the answer is known."""
    return request(seq, tuple(prompt), "n", max_tokens=tokens, ignore_eos=True)


def like(seq: str, first: int, tokens: int = 6) -> SequenceRequest:
    """Return such a request that begins with SYSTEM, behind which it has seven tokens of its own."""
    return lasting(seq, (*SYSTEM, *range(first, first + 7)), tokens)


def decodes_on(cluster: Apart, one: SequenceRequest) -> str:
    """Ask; return the device on which it decodes, as soon as it does."""
    cluster.ask(one, at=cluster.now)
    reach(cluster, lambda: len(cluster.told[one.seq].tokens) > 2)
    return cluster.scheduler.sequences[one.seq].path[0].device


def traced(cluster: Apart, seq: str) -> dict[str, Any]:
    return [each.extra for each in cluster.trace.named("dispatch.candidates") if each.extra.get("seq") == seq][-1]


@pytest.mark.parametrize("rule", RULES)
def test_of_equal_devices_the_one_with_the_prefix_is_taken_unless_it_does_not_count(rule: DecodeRule) -> None:
    taken = {}
    for margin in (0.1, 0.0):
        cluster = loaded(rule, present_margin=margin)
        first = decodes_on(cluster, like("a", 20))
        cluster.run()
        taken[margin] = set[str]()
        for at in range(8):
            taken[margin].add(decodes_on(cluster, like(f"b{at}", 30 + at)))
            cluster.run()
            if margin and rule != "load":
                found = traced(cluster, f"b{at}")
                there = dict(zip((cell[0] for cell in found["cells"]), found["present"], strict=True))
                assert there.pop(first) == 12 and not any(there.values())
                assert not any(found["spared"]), "nothing uses them: taking them leaves fewer free"
        cluster.expect()
        if margin:
            assert taken[margin] == {first} and present(cluster) == 8 * 12
            told = [each.extra for each in cluster.trace.named("dispatch.choose") if each.extra["seq"].startswith("b")]
            assert {each["present"] for each in told} == {12}
    assert len(taken[0.0]) > 1 or rule != "po2"


@pytest.mark.parametrize("rule", ["po2", "least"])
@pytest.mark.parametrize(("margin", "goes_there"), [(0.1, False), (0.7, False), (0.9, True)])
def test_heavier_interference_is_only_as_much_as_the_margin(rule: DecodeRule, margin: float, goes_there: bool) -> None:
    """Its share of heavy decodes would be one half there and none elsewhere; it has 12 of its 19 tokens there."""
    cluster = loaded(rule, devices=2, present_margin=margin)
    owner = decodes_on(cluster, like("x", 20, tokens=90))
    there = decodes_on(cluster, like("b", 30))
    found = traced(cluster, "b")
    cell = [each[0] for each in found["cells"]].index(owner)
    assert found["ratios"][cell] == 0.5 and found["present"][cell] == 12
    layers, pages = N.spec.kv_layers, cluster.scheduler.devices[owner].pages
    mine = (cluster.scheduler.sequences["b"].pages.groups - 3) * layers if goes_there else 0
    assert found["spared"][cell] == 3 * layers, "x uses them, too, which may have grown by one since"
    free = (pages.free + pages.idle + mine + 3 * layers) / pages.capacity
    assert found["free"][cell] == pytest.approx(free, abs=1.1 * layers / pages.capacity)
    assert (there == owner) == goes_there
    cluster.run()
    cluster.expect()


@pytest.mark.parametrize(("margin", "goes_there"), [(0.05, False), (0.5, True)])
def test_by_the_number_of_sequences_nearly_as_few_are_as_good(margin: float, goes_there: bool) -> None:
    """It has 12 of its 19 tokens where one sequence more runs, of four or five."""
    cluster = loaded("load", devices=2, present_margin=margin)
    owner = decodes_on(cluster, like("x", 20, tokens=90))
    (other,) = {"d1", "d2"} - {owner}
    for at in range(6):
        decodes_on(cluster, lasting(f"y{at}", [40 + at] * 3, 90))

    def runs(device: str) -> int:
        return cluster.scheduler.devices[device].passing.count

    while runs(owner) <= runs(other):
        assert decodes_on(cluster, like(f"v{runs(owner)}", 50 + runs(owner), tokens=90)) == owner
    assert (runs(owner), runs(other)) in ((4, 3), (5, 4))
    assert (decodes_on(cluster, like("b", 30)) == owner) == goes_there
    cluster.run()
    cluster.expect()


@pytest.mark.parametrize("caching", ["active", "cached"])
@pytest.mark.parametrize(("admission", "least"), [("static", 26), ("dynamic", 18), ("peak", 17)])
def test_pages_that_stay_in_use_are_not_needed_again(
    admission: ReserveRule, least: int, caching: PrefixCaching
) -> None:
    """Twelve of eighteen page sets are shared; counted for each that comes, only 23, 16 or 15 would run at once."""
    most = {}
    for shared in (False, True):
        config = DecodeConfig(admission=admission)
        settings = {"prefix_caching": caching, "decode": config, "watermark": 0.0}
        cluster = Apart(
            "prefill", "decode", models=(N,), cuts=[(1, 3, 4)], settings=settings, pages=70 * N.spec.kv_layers
        )
        for at in range(30):
            prompt = (*(SYSTEM * 4 if shared else range(at, at + 48)), at, at + 1, at + 2)
            cluster.ask(lasting(f"s{at}", prompt, 20), at=20 * MS)
        most[shared] = 0
        while cluster._heap:
            cluster.run_one()
            device = cluster.scheduler.devices.get("d1")
            most[shared] = max(most[shared], device.passing.count if device else 0)
        cluster.expect()
        assert cluster.scheduler.state().counters.preemptions == 0 or admission != "peak"
    assert most[False] < least <= most[True]


@pytest.mark.parametrize("shared", [True, False])
def test_old_reports_have_room_for_what_is_there(shared: bool) -> None:
    """Three or four page sets are free: with three that another sequence uses, five are enough, and else not."""
    decode = DecodeConfig(choice="least", load_reports_ms=1)
    settings = {"prefix_caching": "active", "decode": decode, "watermark": 0.0}
    cluster = Apart("prefill", "decode", models=(N,), cuts=[(1, 3, 4)], settings=settings, pages=9 * N.spec.kv_layers)
    cluster.ask(like("x", 20, tokens=5), at=20 * MS)
    reach(cluster, lambda: len(cluster.told["x"].tokens) > 1)
    x = cluster.scheduler.sequences["x"]
    x.pause(cluster.now)
    cluster.ask(like("b", 30, tokens=3) if shared else lasting("b", range(50, 69), 3), at=cluster.now + 2 * MS)
    cluster.run(until=cluster.now + 200 * MS)
    assert (len(cluster.told["b"].tokens) == 3) == shared
    x.pause(None)
    cluster.scheduler._state.ready.append(x)
    cluster.tell(Tick())
    cluster.run()
    cluster.expect()


@pytest.mark.parametrize("reports", [0, 5])
@pytest.mark.parametrize("seed", range(6))
def test_choices_at_random_with_deaths_and_aborts(seed: int, reports: int) -> None:
    rng = random.Random(seed)
    config = DecodeConfig(
        choice=rng.choice(RULES), admission=rng.choice(("greedy", "static", "dynamic", "peak")), heavy_tokens=6,
        load_reports_ms=reports, present_margin=rng.choice((0.1, 1.0)), grain=rng.choice(("request", "chunk", "layer")),
    )  # fmt: skip
    cluster = Apart(
        "prefill", "decode", "decode", "decode", pages=rng.choice((70, 120, 400)),
        settings={"decode": config, "prefix_caching": rng.choice(("active", "cached")), "prefill_chunk": 8},
        page_bytes_per_ms=rng.choice((1e9, 200.0)),
    )  # fmt: skip
    run_disturbed(cluster, alike(30, rng), 4, rng)
