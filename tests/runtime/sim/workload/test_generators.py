"""Workload generators: distributions as in the papers, the same for a seed, and unchanged through a file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.bench.lengths import Lengths
from runtime.bench.traces import TraceRow
from runtime.sim.experiments.scenario import scenario_of
from runtime.sim.models.family import Cutting, family_of
from runtime.sim.run.clock import Streams
from runtime.sim.workload.generators import (
    Asked,
    blockllm_demand,
    paper_apps,
    poisson_demand,
    trace_demand,
    twitter_demand,
)
from runtime.sim.workload.requests import SECOND, Demand, read_demand, write_demand
from zoo.errors import InputError

MODELS = tuple(f"m{number}" for number in range(20))


def columns(demand: Demand) -> list[list[int]]:
    return [demand.at.tolist(), demand.model.tolist(), demand.prompt.tolist(), demand.answer.tolist()]


def test_the_papers_workload():
    demand = blockllm_demand(MODELS, Asked(), Streams(0))
    assert len(demand) == 400
    assert demand.at[0] >= 0 and demand.seconds <= 1200
    assert (np.diff(demand.at) >= 0).all()
    assert (demand.prompt + demand.answer <= 1024).all() and demand.prompt.min() >= 8 and demand.answer.min() >= 8
    counts = Counter(demand.model.tolist())
    # Rates are uniform from 0: the busiest application has about twice the mean, the quietest almost none.
    assert max(counts.values()) > 1.5 * 400 / 20 and min(counts.get(number, 0) for number in range(20)) < 0.5 * 400 / 20


def test_gaps_are_those_of_a_poisson_process():
    gaps = np.diff(poisson_demand(MODELS, Asked(20_000, 20_000.0), Streams(1)).at) / SECOND
    assert gaps.mean() == pytest.approx(1.0, rel=0.05) and gaps.std() == pytest.approx(1.0, rel=0.05)


def test_rates_like_twitters_stay_within_their_bounds_and_go_up_and_down():
    demand = twitter_demand(MODELS, Asked(10_000_000, 3600.0), Streams(2))
    per_minute = np.bincount((demand.at // (60 * SECOND)).astype(int), minlength=60) / 60
    assert per_minute.max() < 45 + 5 and per_minute.min() > 1 - 0.5
    assert per_minute[25:35].mean() > 2 * per_minute[:5].mean()
    assert len(twitter_demand(MODELS, Asked(100, 3600.0), Streams(2))) == 100


@pytest.mark.parametrize("make", [blockllm_demand, twitter_demand, poisson_demand])
def test_one_seed_one_demand(make):
    asked = Asked(200, 600.0, Lengths("lognormal", 64, sigma=0.5), Lengths("fixed", 3))
    assert columns(make(MODELS, asked, Streams(5))) == columns(make(MODELS, asked, Streams(5)))
    assert columns(make(MODELS, asked, Streams(5))) != columns(make(MODELS, asked, Streams(6)))


def test_requests_are_what_the_columns_say():
    demand = blockllm_demand(MODELS, Asked(50), Streams(0))
    requests = list(demand.requests())
    assert [request.arrival for request in requests] == demand.at.tolist()
    assert [len(request.prompt) for request in requests] == demand.prompt.tolist()
    assert [request.sampling.max_tokens for request in requests] == demand.answer.tolist()
    assert [request.model for request in requests] == [MODELS[number] for number in demand.model]
    assert all(request.sampling.ignore_eos for request in requests)
    assert len({request.prompt[0] for request in requests}) == 50


def test_a_demand_goes_through_a_file(tmp_path: Path):
    demand = blockllm_demand(MODELS, Asked(60), Streams(0))
    write_demand(demand, tmp_path / "a.jsonl")
    found = read_demand(tmp_path / "a.jsonl")
    assert [found.models[number] for number in found.model] == [MODELS[number] for number in demand.model]
    assert columns(found)[0] == columns(demand)[0] and columns(found)[2:] == columns(demand)[2:]
    write_demand(found, tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json\n",
        '{"at":0,"model":"m","prompt":3}\n',
        '{"at":0,"model":"m","prompt":0,"answer":1}\n',
        '{"at":-1,"model":"m","prompt":1,"answer":1}\n',
    ],
)
def test_a_file_that_is_none_is_refused(text: str, tmp_path: Path):
    (tmp_path / "wrong.jsonl").write_text(text)
    with pytest.raises(InputError, match=r"wrong\.jsonl"):
        read_demand(tmp_path / "wrong.jsonl")
    with pytest.raises(InputError):
        read_demand(tmp_path / "missing.jsonl")


def test_traces_keep_their_times_and_lengths():
    rows = [TraceRow(0.0, 5, 6), TraceRow(1.5, 7, 8), TraceRow(3.0, 2000, 9)]
    demand = trace_demand(("a", "b"), rows, Asked(), Streams(0), "distinct")
    assert columns(demand) == [[0, 1_500_000_000, 3_000_000_000], [0, 1, 0], [5, 7, 1023], [6, 8, 1]]
    timeless = trace_demand(
        ("a",), [TraceRow(None, None, None, "text", "reply")] * 9, Asked(9, 90.0), Streams(0), "identical"
    )
    assert (np.diff(timeless.at) > 0).all() and timeless.prompt.min() >= 8


def test_faster_is_the_same_in_less_time():
    demand = blockllm_demand(MODELS, Asked(), Streams(0))
    assert demand.faster(10).seconds == pytest.approx(demand.seconds / 10)
    assert columns(demand.faster(10))[1:] == columns(demand)[1:]


def test_the_papers_applications():
    apps = paper_apps(20)
    assert len({app.name for app in apps}) == 20
    assert Counter(app.foundation for app in apps) == {"llama-7b": 7, "llama-13b": 7, "chatglm-6b": 6}
    assert [app.foundation for app in apps if app.kind == "full"] == ["llama-7b", "llama-13b"]
    assert {app.kind for app in apps} == {"full", "lora", "adapter", "prefix", "bitfit"}
    private = sum(block.nbytes for block in family_of(apps, Cutting("pm")).blocks())
    shared = sum(block.nbytes for block in family_of(apps, Cutting("blocks")).blocks())
    assert shared < 0.3 * private


@pytest.mark.parametrize(
    "wrong", [lambda: Asked(0), lambda: Asked(seconds=0), lambda: Asked(longest=1), lambda: paper_apps(0)]
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(InputError):
        wrong()


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"cluster": {"servers": []}}, "servers with devices"),
        ({"cluster": {"servers": [2, 0]}}, "servers with devices"),
        ({"cluster": {"servers": ["a"]}}, "servers"),
        ({"cluster": {"servers": 4}}, "servers"),
        ({"cluster": {"servers": [1 << 40]}}, "at most 65,536"),
        ({"cluster": {"usable": "all"}}, "usable"),
        ({"cluster": {"usable": float("nan")}}, "usable is no number"),
        ({"apps": {"count": "many"}}, "count"),
        ({"apps": {"count": 10**9}}, "apps.count"),
        ({"apps": {"foundations": "llama-7b"}}, "foundations"),
        ({"asked": {"count": 0}}, "asked.count"),
        ({"asked": {"count": 2.5}}, "count"),
        ({"asked": {"kind": "nope"}}, "kind"),
        ({"asked": {"prompts": 5}}, "prompts"),
        ({"asked": {"popularity": "nope"}}, "popularity"),
        ({"asked": 5}, "asked is a table"),
        ({"pace": {"tick": -1}}, "pace"),
        ({"pace": {"tick": "slow"}}, "tick"),
        ({"policies": {}}, "at least one policy"),
        ({"policies": {"a": {"prefill_chunk": "x"}}}, "prefill_chunk"),
        ({"policies": {"a": {"control": {"bandwidth": float("nan")}}}}, "bandwidth is no number"),
        ({"policies": {"a": {"control": {"nope": 1}}}}, "nope"),
        ({"nope": {}}, "nope"),
    ],
)
def test_what_a_scenario_cannot_say_is_refused_by_name(tables: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        scenario_of("wrong", tables).resized(3, None)
