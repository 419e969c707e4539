"""Runs of the baselines: every request is answered, reserves hold, and each of their costs can be seen."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.sim.experiments.engines import deploy
from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.results.report import document_of
from zoo.errors import InputError


def scenario(apps: int = 5, provision: str = "pm", servers: tuple[int, ...] = (2,), **engines: Any) -> Scenario:
    return scenario_of(
        "small",
        {
            "cluster": {"servers": list(servers)},
            "apps": {"count": apps, "foundations": ["llama-7b"]},
            "asked": {"count": 60, "seconds": 60.0, "prompts": "uniform:8-64", "answers": "uniform:2-48"},
            "policies": {"one": {"provision": provision, "engines": engines}},
        },
    )


def results(made: Scenario) -> dict[str, Any]:
    return document_of(play(made, "one", made.demand(0)))


@pytest.mark.parametrize("engines", [{}, {"run_to_completion": True}])
@pytest.mark.parametrize("provision", ["pm", "ps"])
def test_every_request_gets_its_tokens_and_reserves_hold(provision: str, engines: dict[str, Any]):
    made = scenario(7, provision, **engines)
    run = deploy(made, made.policies["one"])
    demand = made.demand(0)
    told = run._begin

    def checked(name: str, device: Any) -> None:
        for each in run.devices:
            assert sum(one.nbytes for one in run.engines if one.device == each) <= run.devices[each].memory
        assert all(one.used <= one.capacity for one in run.engines)
        told(name, device)

    run._begin = checked  # type: ignore[method-assign]
    ledger = run.run(demand.requests())
    assert list(ledger.tokens) == demand.answer.tolist()
    assert ledger.reasons == {"length": 60}


def test_engines_stop_and_start_where_not_all_fit():
    """Seven models on two devices with room for four: a start costs its loads and the stated time."""
    quick, slow = results(scenario(7, start_s=0.0)), results(scenario(7, start_s=30.0))
    assert quick["counts"]["stops"] > 0 and quick["loads"]["count"] > 7
    assert slow["ttft"]["mean"] > quick["ttft"]["mean"] + 5


def test_sharing_a_foundation_needs_one_engine():
    apart, shared = results(scenario(4, "pm")), results(scenario(4, "ps"))
    assert (apart["counts"]["starts"], shared["counts"]["starts"]) == (4, 1)
    assert shared["memory"]["weights_max"] < 0.4 * apart["memory"]["weights_max"]


def test_a_larger_reserve_leaves_room_for_fewer_engines():
    small, large = results(scenario(4)), results(scenario(4, reserve_seqs=64))
    assert small["counts"]["stops"] == 0 < large["counts"]["stops"]


def test_the_same_requests_give_the_same_run():
    first, second = results(scenario(7)), results(scenario(7))
    for name in ("real",):
        first.pop(name), second.pop(name)
    assert first == second


def test_engines_that_fit_nowhere_and_policies_without_engines_are_refused():
    with pytest.raises(InputError, match="no device has so many"):
        results(scenario(reserve_seqs=200))
    with pytest.raises(InputError, match="pm or ps"):
        results(scenario(provision="blocks"))
