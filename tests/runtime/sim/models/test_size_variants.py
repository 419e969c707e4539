"""Figure 16 in small: under load the smaller model answers, and the larger one again when the load is over."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.results.report import accuracy_of, document_of
from zoo.errors import InputError

ACCURACY = {"llama-7b": 0.4, "llama-1.1b": 0.2}


def scenario(step_ms: float, count: int = 120, **changes: Any) -> Scenario:
    values = {
        "cluster": {"servers": [2], "disk": "nvlink3"},
        "apps": {"ladder": list(ACCURACY), "accuracy": list(ACCURACY.values()), "step_ms": step_ms},
        "asked": {"kind": "poisson", "count": count, "seconds": 2.0, "prompts": "16", "answers": "24"},
        "policies": {"blocks": {"placement": "eager", "parts": 1, "page_layers": 8, "prefix_caching": "off"}},
    }
    return scenario_of("ladder", values | changes)


def served(one: Scenario) -> tuple[int, dict[str, Any]]:
    played = play(one, "blocks", one.demand(0))
    assert document_of(played)["completed"] == one.asked.count
    return len(played.ledger.served), accuracy_of(played, ACCURACY, pieces=4)


def test_the_larger_model_answers_as_long_as_its_steps_are_short_enough():
    adapted, accuracy = served(scenario(60_000.0))  # long enough for its load at the start, too
    assert adapted == 0 and accuracy["mean"] == pytest.approx(0.4)


def test_loads_count_before_the_larger_model_is_there():
    adapted, _ = served(scenario(1000.0))
    assert 0 < adapted < 120 / 2


def test_what_would_take_too_long_goes_to_the_smaller_one():
    adapted, accuracy = served(scenario(11.5))
    assert 0 < adapted < 120
    assert 0.2 < accuracy["mean"] < 0.4
    assert sum(share for share in (adapted / 120, (accuracy["mean"] - 0.2) / 0.2)) == pytest.approx(1.0)
    assert [rate for rate, _ in accuracy["by_rate"]] == sorted(rate for rate, _ in accuracy["by_rate"])


@pytest.mark.parametrize(
    "apps", [{"ladder": ["llama-7b"]}, {"ladder": ["llama-7b"], "accuracy": [1.5]}, {"step_ms": 0.0}]
)
def test_a_ladder_without_sense_is_refused(apps: dict[str, Any]):
    with pytest.raises(InputError):
        scenario_of("ladder", {"apps": apps})
