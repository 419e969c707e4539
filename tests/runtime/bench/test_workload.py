"""Arrivals, lengths, popularity and the workloads made of them.

Tests are exact where possible, and statistical with wide margins elsewhere.
"""

from __future__ import annotations

import statistics
from collections import Counter

import numpy as np
import pytest

from runtime.bench.arrivals import Arrivals, times
from runtime.bench.lengths import Lengths, draw, parse_lengths
from runtime.bench.popularity import assign, shares
from runtime.bench.traces import TraceRow
from runtime.bench.workload import WorkloadSettings, build
from zoo.errors import InputError

MODELS = ("a", "b", "c", "d")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def gaps(arrivals: Arrivals, count: int = 20_000) -> list[float]:
    return [float(gap) for gap in np.diff([0.0, *times(arrivals, count, rng())])]


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_of_a_gamma_process_have_the_asked_mean_and_variation(cv: float) -> None:
    drawn = gaps(Arrivals(4.0, "gamma", cv))
    assert min(drawn) >= 0.0
    assert statistics.fmean(drawn) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(drawn) / statistics.fmean(drawn) == pytest.approx(cv, rel=0.1)


def test_poisson_arrivals_are_without_memory() -> None:
    drawn = gaps(Arrivals(10.0, cv=7.0))  # `cv` applies to gamma arrivals only
    longer = [gap for gap in drawn if gap > 0.1]
    assert len(longer) / len(drawn) == pytest.approx(np.exp(-1), rel=0.05)
    assert statistics.fmean(gap - 0.1 for gap in longer) == pytest.approx(0.1, rel=0.1)


def test_fixed_arrivals_and_those_at_once_are_exact() -> None:
    assert times(Arrivals(4.0, "fixed"), 3, rng()) == [0.25, 0.5, 0.75]
    assert times(Arrivals(), 3, rng()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "wrong", [{"rate": 0.0}, {"rate": -1.0}, {"rate": 1.0, "cv": 0.0}, {"kind": "bursts"}, {"rate": float("nan")}]
)
def test_arrivals_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Arrivals(**wrong)  # type: ignore[arg-type]


def test_lengths_as_they_are_written() -> None:
    assert parse_lengths("32") == Lengths("fixed", 32)
    assert parse_lengths("uniform:4-6") == Lengths("uniform", 4, 6)
    assert parse_lengths("lognormal:128, 0.8 <=512") == Lengths("lognormal", 128, sigma=0.8, most=512)


@pytest.mark.parametrize(
    "wrong", ["", "0", "-3", "uniform:6-4", "uniform:0-4", "lognormal:128", "9999999", "32<=0", "normal:3,4"]
)
def test_lengths_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(InputError):
        parse_lengths(wrong)


def test_drawn_lengths_are_distributed_as_asked() -> None:
    assert draw(parse_lengths("7"), 3, rng()) == [7, 7, 7]
    uniform = Counter(draw(parse_lengths("uniform:4-6"), 3000, rng()))
    assert set(uniform) == {4, 5, 6} and min(uniform.values()) > 900
    normal = draw(parse_lengths("lognormal:100,0.5"), 5000, rng())
    assert statistics.median(normal) == pytest.approx(100, rel=0.05)
    assert statistics.stdev(np.log(normal).tolist()) == pytest.approx(0.5, rel=0.05)
    bounded = draw(parse_lengths("lognormal:100,2<=150"), 1000, rng())
    assert min(bounded) >= 1 and max(bounded) == 150


def test_popularity() -> None:
    assert assign("identical", 4, 3, 1.0, rng()) == [0, 0, 0]
    assert assign("distinct", 4, 6, 1.0, rng()) == [0, 1, 2, 3, 0, 1]
    assert shares("uniform", 4, 1.0) == [0.25] * 4
    assert shares("skewed", 3, 1.0) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert shares("skewed", 3, 2.0) == pytest.approx([36 / 49, 9 / 49, 4 / 49])
    drawn = Counter(assign("skewed", 3, 11_000, 1.0, rng()))
    assert [drawn[model] for model in range(3)] == pytest.approx([6000, 3000, 2000], rel=0.08)
    even = Counter(assign("uniform", 4, 8000, 1.0, rng()))
    assert [even[model] for model in range(4)] == pytest.approx([2000] * 4, rel=0.1)


def test_a_workload_depends_on_its_settings_and_its_seed_alone() -> None:
    settings = WorkloadSettings(
        20, 5, Arrivals(3.0), prompts=parse_lengths("uniform:4-9"), answers=parse_lengths("uniform:1-5")
    )
    one, same = build(settings, MODELS), build(settings, MODELS)
    assert one == same
    assert build(WorkloadSettings(20, 6, Arrivals(3.0), prompts=settings.prompts), MODELS) != one
    faster = build(WorkloadSettings(20, 5, Arrivals(6.0), prompts=settings.prompts, answers=settings.answers), MODELS)
    assert [(ask.model, ask.prompt, ask.answer) for ask in faster.asks] == [
        (ask.model, ask.prompt, ask.answer) for ask in one.asks
    ]
    assert [ask.at for ask in faster.asks] == pytest.approx([ask.at / 2 for ask in one.asks])
    assert all(3 <= token < 1000 for ask in one.asks for token in ask.prompt)  # type: ignore[operator]
    assert {len(ask.prompt) for ask in one.asks} <= set(range(4, 10))


def test_a_trace_gives_times_and_lengths_and_is_not_repeated() -> None:
    rows = [TraceRow(0.0, 5, 2), TraceRow(8.0, 6, 3)]
    made = build(WorkloadSettings(50, speed=4.0, popularity="distinct"), MODELS, rows)
    assert [(ask.at, ask.model, len(ask.prompt), ask.answer) for ask in made.asks] == [
        (0.0, "a", 5, 2),
        (2.0, "b", 6, 3),
    ]
    paced = build(WorkloadSettings(50, arrivals=Arrivals(2.0, "fixed"), speed=4.0), MODELS, rows)
    assert [ask.at for ask in paced.asks] == [0.5, 1.0]


def test_equal_blocks_of_a_trace_are_equal_tokens() -> None:
    rows = [TraceRow(0.0, 600, 1, blocks=(7, 8)), TraceRow(0.0, 1030, 1, blocks=(7, 9, 10)), TraceRow(0.0, 600, 1)]
    a, b, c = (ask.prompt for ask in build(WorkloadSettings(3), MODELS, rows).asks)
    assert [len(prompt) for prompt in (a, b, c)] == [600, 1030, 600]
    assert a[:512] == b[:512] and a[512:600] != b[512:600] and a[:512] != c[:512]


def test_texts_become_ids_where_somebody_can_count() -> None:
    rows = [TraceRow(None, None, None, text="wie geht es", reply="gut und dir")]
    counted = build(WorkloadSettings(1), MODELS, rows, encode=lambda text: [len(word) for word in text.split()]).asks[0]
    assert (counted.prompt, counted.answer) == ((3, 4, 2), 3)
    plain = build(WorkloadSettings(1), MODELS, rows).asks[0]
    assert (plain.prompt, plain.answer) == ("wie geht es", 2)  # 11 characters, four per token


def test_what_is_too_long_is_cut_from_the_front_and_then_the_answer() -> None:
    rows = [TraceRow(0.0, 50, 4), TraceRow(0.0, 6, 40), TraceRow(0.0, 3, 3)]
    asks = build(WorkloadSettings(3, longest=10), MODELS, rows).asks
    assert [(len(ask.prompt), ask.answer) for ask in asks] == [(9, 1), (6, 4), (3, 3)]
    full = build(WorkloadSettings(3), MODELS, rows).asks
    assert asks[0].prompt == full[0].prompt[-9:]


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0},
        {"clients": 0},
        {"vocabulary": 3},
        {"zipf": -1.0},
        {"speed": 0.0},
        {"longest": 1},
        {"clients": 1, "arrivals": Arrivals(1.0)},
    ],
)
def test_settings_that_make_no_workload_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        WorkloadSettings(**wrong)  # type: ignore[arg-type]


def test_a_workload_needs_a_model() -> None:
    with pytest.raises(InputError, match="no model"):
        build(WorkloadSettings(), ())
