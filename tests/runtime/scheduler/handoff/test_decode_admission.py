"""Reservation for what answers will still get, and where they decode (TI-14, TI-20 to TI-22)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from runtime.config import ClusterConfig
from runtime.control.scheduler_io import LengthPredicted
from runtime.decode_config import DecodeConfig, DecodeRule, ReserveRule
from runtime.policy.lengths.forecast import LengthForecast
from runtime.types import SequenceRequest
from tests.runtime.scheduler.handoff.apart import Apart
from tests.runtime.scheduler.test_scheduler import CUTS, M, N, some
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request


def lasting(count: int, seed: int) -> list[SequenceRequest]:
    """Return requests that nothing but their limit ends, so that their lengths are known."""
    draw = random.Random(seed)
    return [
        request(f"s{at}", range(draw.randrange(3, 12)), "m", max_tokens=draw.randrange(2, 45), ignore_eos=True)
        for at in range(count)
    ]


def apart(admission: ReserveRule, requests: Sequence[SequenceRequest], pages: int = 80, **decode: Any) -> Apart:
    config = DecodeConfig(admission=admission, **decode)
    cluster = Apart("prefill", "decode", pages=pages, settings={"decode": config})
    for at, one in enumerate(requests):
        cluster.ask(one, at=at * MS)
    cluster.run()
    cluster.expect()
    return cluster


def preemptions(cluster: VirtualCluster) -> int:
    return cluster.scheduler.state().counters.preemptions


@pytest.mark.parametrize("seed", range(3))
def test_with_known_lengths_the_peak_rule_preempts_none(seed: int) -> None:
    requests = lasting(30, seed)
    assert preemptions(apart("greedy", requests)) > 0
    cluster = apart("peak", requests)
    assert preemptions(cluster) == 0
    cluster.expect_phases()
    cluster.expect_one_transfer_each()


def test_the_paper_s_rules_preempt_fewer_than_none_and_more_than_the_peak() -> None:
    counts = Counter[str]()
    for seed in range(4):
        for rule in ("greedy", "static", "dynamic", "peak"):
            counts[rule] += preemptions(apart(rule, lasting(30, seed)))  # type: ignore[arg-type]
    assert counts["peak"] == 0 < min(counts["static"], counts["dynamic"])
    assert max(counts["static"], counts["dynamic"]) < counts["greedy"]


def test_it_holds_on_one_device_without_roles_too() -> None:
    found = {}
    for admission in ("greedy", "peak"):
        config = ClusterConfig(decode=DecodeConfig(admission=admission))  # type: ignore[arg-type]
        cluster = VirtualCluster((M, N), CUTS, devices=1, pages=80, config=config)
        cluster.ask(*lasting(30, 1))
        cluster.run()
        cluster.expect()
        found[admission] = preemptions(cluster)
    assert found["greedy"] > 0 == found["peak"]


def test_an_answer_expected_to_need_more_than_there_is_runs_alone() -> None:
    long = request("long", range(8), "m", max_tokens=50, ignore_eos=True)
    short = [request(f"s{at}", range(4), "m", max_tokens=6, ignore_eos=True) for at in range(6)]
    cluster = Apart("prefill", "decode", pages=45, settings={"decode": DecodeConfig(admission="peak")})
    cluster.ask(short[0], long, *short[1:])
    cluster.run()
    cluster.expect()


def test_lengths_are_learned_from_the_answers_that_have_ended() -> None:
    """All answers may get 48 tokens, and get 6: once that is known, more of them run before the first one ends."""
    beside = []
    for learned in (0, 40):
        cluster = Apart("prefill", "decode", pages=90, settings={"decode": DecodeConfig(admission="peak")})
        ending = _ending_after(6)
        cluster.ask(*(request(f"a{at}", range(5), "m", max_tokens=48, stop_token_ids=ending) for at in range(learned)))
        cluster.run()
        cluster.ask(*(request(f"b{at}", range(5), "m", max_tokens=48, stop_token_ids=ending) for at in range(20)))
        while not any(len(told.tokens) == 6 for seq, told in cluster.told.items() if seq.startswith("b")):
            cluster.run_one()
        beside.append(most_decoding(cluster))
        cluster.run()
        cluster.expect()
    assert beside[0] < beside[1] / 2


def most_decoding(cluster: Apart) -> int:
    """Return the most sequences that had a token on the device that decodes so far."""
    return len({seq for device, seq, *_ in cluster.ran if device == "d1" and seq.startswith("b")})


def _ending_after(tokens: int) -> tuple[int, ...]:
    """Return the token that ends the answer to the prompts of the test above after so many tokens."""
    cluster = Apart("prefill", "decode", pages=200)
    cluster.ask(request("probe", range(5), "m", max_tokens=30))
    cluster.run()
    told = cluster.told["probe"].tokens
    assert told[tokens - 1] not in told[: tokens - 1]
    return (told[tokens - 1],)


def most_beside(max_tokens: int, mass: tuple[float, float] | None) -> int:
    """Return the most of sixteen sequences that decode at once, with a forecast or of known lengths."""
    cluster = Apart("prefill", "decode", pages=90, settings={"decode": DecodeConfig(admission="peak")})
    for at in range(16):
        cluster.ask(request(f"s{at}", range(5), "m", max_tokens=max_tokens, ignore_eos=mass is None))
        if mass is not None:
            forecast = LengthPredicted(f"s{at}", LengthForecast((0, 18), mass))
            cluster.at(cluster.now, partial(cluster.tell, forecast))
    seen = 0
    while cluster.scheduler.busy or not cluster.now:
        cluster.run_one()
        device = cluster.scheduler.devices.get("d1")
        seen = max(seen, device.passing.count if device else 0)
    cluster.run()
    cluster.expect()
    expected = set() if mass is None else {f"s{at}" for at in range(16)}
    assert {event.seq for event in cluster.trace.named("length.predicted")} == expected
    return seen


def test_a_forecast_takes_the_place_of_what_is_learned() -> None:
    """With forecasts of a few tokens many run at once, with long ones few; both end with the same tokens."""
    assert most_beside(20, (1.0, 0.0)) > most_beside(20, (0.0, 1.0))


def test_a_request_s_own_limit_caps_its_forecast() -> None:
    """A forecast of 18 tokens and more lets as many run as known lengths of 4 where requests allow 4 tokens."""
    assert most_beside(4, (0.0, 1.0)) >= most_beside(4, None) > most_beside(20, (0.0, 1.0))


# -- where it decodes --------------------------------------------------------------------------------------------------


def spread(choice: DecodeRule, seed: int = 0, page_bytes_per_ms: float = 1e9, **decode: Any) -> Apart:
    config = DecodeConfig(choice=choice, heavy_tokens=20, present_margin=0.0, **decode)
    settings = {"placement": "replicate", "decode": config}
    cluster = Apart(
        "prefill",
        *["decode"] * 4,
        pages=600,
        settings=settings,
        models=(M,),
        cuts=CUTS[:1],
        page_bytes_per_ms=page_bytes_per_ms,
    )
    draw = random.Random(seed)
    for at in range(40):
        tokens = draw.choice((4, 44))
        cluster.ask(request(f"s{seed}-{at}", range(6), "m", max_tokens=tokens, ignore_eos=True), at=at * MS)
        forecast = LengthForecast((0, 20), (0.0, 1.0) if tokens > 40 else (1.0, 0.0))
        cluster.at(at * MS + 1000, partial(cluster.tell, LengthPredicted(f"s{seed}-{at}", forecast)))
    cluster.run()
    cluster.expect()
    cluster.expect_phases()
    return cluster


def choices(cluster: Apart) -> list[dict[str, Any]]:
    """Return the choice by which each sequence went: an earlier one may have found its stages still loading."""
    found = {
        each.extra["seq"]: each.extra for each in cluster.trace.named("dispatch.candidates") if each.cause == "TI-14"
    }
    return list(found.values())


@pytest.mark.parametrize("choice", ["po2", "least", "random", "worst"])
def test_choices_are_traced_and_repeat_themselves(choice: DecodeRule) -> None:
    first, second = (choices(spread(choice)) for _ in range(2))
    assert first == second and len(first) == 40
    for found in first:
        assert found["chosen"] in found["drawn"] and set(found["drawn"]) <= set(found["alpha"])
        assert len(found["cells"]) == 4 and found["age"] == 0
        assert len(found["drawn"]) == {"po2": 2, "random": 1}.get(choice, 4)
    if choice == "po2":
        assert len({tuple(found["drawn"]) for found in first}) > 4
    if choice in ("po2", "least"):
        assert all(
            found["ratios"][found["chosen"]] == min(found["ratios"][at] for at in found["drawn"]) for found in first
        )


def test_the_best_has_heavy_decodes_more_evenly_than_the_worst() -> None:
    def unevenness(choice: DecodeRule) -> int:
        found = choices(spread(choice))
        heavy = Counter(tuple(each["cells"][each["chosen"]]) for each in found if each["heavy"])
        return max(heavy.values()) - min(heavy.get((f"d{at}",), 0) for at in range(1, 5))

    assert unevenness("least") < unevenness("worst")


def expect_ratios_of_history(found: Sequence[dict[str, Any]]) -> None:
    """Assert that each choice saw all earlier ones, and none of their ends."""
    sent: dict[str, list[bool]] = {}
    for each in found:
        there = [sent.get(cell[0], []) for cell in each["cells"]]
        assert each["ratios"] == tuple((sum(some) + each["heavy"]) / (len(some) + 1) for some in there)
        sent.setdefault(each["cells"][each["chosen"]][0], []).append(each["heavy"])


def test_old_reports_are_used_with_what_was_sent_since() -> None:
    found = choices(spread("least", load_reports_ms=1000))
    assert max(each["age"] for each in found) > 20 * MS
    expect_ratios_of_history(found)


def test_what_is_on_its_way_counts() -> None:
    found = choices(spread("least", page_bytes_per_ms=1.0))
    assert any(each["heavy"] for each in found[:8])
    expect_ratios_of_history(found[:8])


def test_an_answer_that_is_forecast_again_counts_as_what_it_is_forecast_to_be() -> None:
    """A heavy decode that turns out to be light is one no more where the next is placed, and the other way round."""
    for heavy in (True, False):
        decode = DecodeConfig(choice="least", heavy_tokens=20)
        cluster = Apart("prefill", "decode", models=(M,), cuts=CUTS[:1], settings={"decode": decode}, pages=600)
        cluster.ask(request("a", range(6), "m", max_tokens=44))
        masses = ((0.0, 1.0), (1.0, 0.0)) if heavy else ((1.0, 0.0), (0.0, 1.0))
        for at, mass in zip((1000, 12 * MS), masses, strict=True):
            cluster.at(at, partial(cluster.tell, LengthPredicted("a", LengthForecast((0, 20), mass))))
        for name, at in (("b", 7 * MS), ("c", 14 * MS)):
            cluster.ask(request(name, range(20, 26), "m", max_tokens=2, ignore_eos=True), at=at)
        cluster.run()
        cluster.expect()
        told = {each["seq"]: each for each in choices(cluster)}
        found = [told[name]["ratios"] for name in "bc"]
        assert found == [((1 if heavy else 0) / 2,), ((0 if heavy else 1) / 2,)]


def test_settings_that_are_none_are_refused() -> None:
    wrong_ones = (
        {"admission": "x"},
        {"choice": "x"},
        {"quantile": 1.0},
        {"load_reports_ms": -1},
        {"present_margin": 1.1},
    )
    for wrong in wrong_ones:
        with pytest.raises(ValueError, match=r"admission|choice|quantile|margin"):
            DecodeConfig(**wrong)  # type: ignore[arg-type]


def test_random_schedules_lose_nothing() -> None:
    rules: tuple[ReserveRule, ...] = ("static", "dynamic", "peak")
    for seed in range(3):
        cluster = Apart(
            "prefill", "decode", "both", pages=90,
            settings={"decode": DecodeConfig(admission=rules[seed], choice="po2", load_reports_ms=seed * 5)},
        )  # fmt: skip
        for at, one in enumerate(some(24, seed)):
            cluster.ask(one, at=at * MS)
        cluster.run()
        cluster.expect()
