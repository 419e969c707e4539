"""Classes of requests in simulated demands: shares, lengths and times, and attainment in the report."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.results.report import classes_of
from zoo.errors import InputError

CLASSES = {
    "interactive": {"share": 0.2, "slo_ms": 1500, "answers": "64"},
    "batch": {"share": 0.8, "answers": "uniform:700-800", "within": 0.0},
}


def scenario(classes: Any = CLASSES, **policies: Any) -> Scenario:
    base = {"max_num_seqs": 8, "parts": 1, "control": {"scaling": False, "rearranging": False, "proactive": False}}
    return scenario_of(
        "classes",
        {
            "cluster": {"servers": [1]},
            "apps": {"count": 2, "foundations": ["llama-7b"]},
            "asked": {"kind": "poisson", "count": 60, "seconds": 30.0, "prompts": "64", "after": 30.0},
            "classes": classes,
            "policies": {name: {**base, "order": order} for name, order in policies.items()} or {"blocks": base},
        },
    )


def test_requests_have_their_class_and_arrive_in_order() -> None:
    low = {**CLASSES, "batch": {**CLASSES["batch"], "priority": 2}}
    made, without = scenario(low).demand(0), scenario({}).demand(0)
    requests = list(made.requests())
    interactive = [each for each in requests if each.slo_ms is not None]
    batch = [each for each in requests if each.slo_ms is None]
    assert 4 < len(interactive) < 24 and len(interactive) + len(batch) == 60
    assert {(each.slo_ms, each.priority, each.sampling.max_tokens) for each in interactive} == {(1500, 0, 64)}
    assert {each.priority for each in batch} == {2} and {each.arrival for each in batch} == {requests[0].arrival}
    assert min(each.sampling.max_tokens for each in batch) >= 700
    assert [each.arrival for each in requests] == sorted(each.arrival for each in requests)
    assert set(made.at.tolist()) <= set(without.at.tolist()), "classes draw no times of their own"
    assert not without.classes and all(each.slo_ms is None for each in without.requests())


def test_classes_stay_with_their_requests_when_the_demand_is_faster_or_later() -> None:
    made = scenario().demand(0)
    for other in (made.faster(2.0), made.later(9.0)):
        assert [each.slo_ms for each in other.requests()] == [each.slo_ms for each in made.requests()]


def test_the_report_has_attainment_by_class_and_order_changes_it() -> None:
    made = scenario(fcfs={"plan": "fcfs"}, qlm={"plan": "qlm"}, stay={"plan": "qlm", "evict": False})
    demand = made.demand(0)
    met = {}
    for policy in made.policies:
        found = classes_of(play(made, policy, demand), demand)["classes"]
        assert sum(each["requests"] for each in found.values()) == 60
        assert "met" not in found["batch"] and found["batch"]["latency"]["max"] > 0
        met[policy] = found["interactive"]["met"]
    assert met["fcfs"] < 0.2 and met["qlm"] > 0.8 and met["stay"] < met["qlm"] - 0.3, met
    assert classes_of(play(scenario({}), "blocks", scenario({}).demand(0)), scenario({}).demand(0)) == {}


def test_shares_are_checked() -> None:
    with pytest.raises(InputError, match="shares of all classes together are 1"):
        scenario({"one": {"share": 0.5}}).demand(0)
    with pytest.raises(InputError, match=r"classes\.one"):
        scenario({"one": {"shares": 1.0}})


def test_attainment_may_be_of_first_tokens() -> None:
    """QL-21: the answers take longer than the objective, and their first tokens do not."""
    classes = {"all": {"share": 1.0, "ttft_slo_ms": 1500, "answers": "200"}}
    made = scenario(classes, qlm={"plan": "qlm"})
    demand = made.demand(0)
    assert {(each.slo_ms, each.ttft_slo_ms) for each in demand.requests()} == {(None, 1500)}
    found = classes_of(play(made, "qlm", demand), demand)["classes"]["all"]
    assert found["met"] > 0.5 and found["latency"]["mean"] > 1.5
    with pytest.raises(InputError, match="slo_ms or ttft_slo_ms"):
        scenario({"all": {"share": 1.0, "slo_ms": 1, "ttft_slo_ms": 1}})
