"""Hidden lengths end where they should, and forecasts of them are right as often as asked for (TI-10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import scenario_of
from runtime.sim.results.played import Played
from runtime.sim.workload.predictions import PredictedLengths
from runtime.sim.workload.requests import Demand
from zoo.errors import InputError

ANSWERS = (3, 40, 7, 120, 1, 60, 60, 9)


def played(lengths: Mapping[str, Any], **policy: Any) -> Played:
    made = scenario_of(
        "hidden",
        {
            "cluster": {"servers": [1]},
            "apps": {"ladder": ["llama-7b"], "accuracy": [1.0]},
            "asked": {"longest": 512},
            "policies": {"one": {"provision": "blocks", "parts": 1, "lengths": lengths, **policy}},
        },
    )
    answers = np.array(ANSWERS, dtype=np.int64)
    zeros = np.zeros(len(ANSWERS), dtype=np.int64)
    return play(made, "one", Demand(made.models(), zeros, zeros, zeros + 20, answers))


def test_answers_with_hidden_lengths_end_by_a_stop_token_after_as_many_tokens() -> None:
    open_, hidden = played({}), played({"hidden": True})
    assert list(open_.ledger.tokens) == list(hidden.ledger.tokens) == list(ANSWERS)
    assert open_.ledger.reasons == {"length": len(ANSWERS)} and hidden.ledger.reasons == {"stop": len(ANSWERS)}
    assert list(open_.ledger.ended) == list(hidden.ledger.ended)  # nothing depends on lengths by default


@pytest.mark.parametrize("accuracy", [1.0, 0.75, 0.2])
def test_forecasts_are_right_as_often_as_asked_for(accuracy: float) -> None:
    lengths = PredictedLengths(hidden=True, granularity=50, accuracy=accuracy)
    right = beside = 0
    for number in range(2000):
        answer = 1 + number % 500
        forecast = lengths.forecast(f"r{number}", answer, 512)
        assert forecast is not None and sum(forecast.mass) == pytest.approx(1.0)
        right += forecast.bucket == answer // 50 if accuracy > 0.5 else 0
        beside += abs(forecast.bucket - answer // 50) <= 1
    assert beside == 2000 or accuracy < 0.5
    assert accuracy < 0.5 or right / 2000 == pytest.approx(accuracy, abs=0.03)


def test_a_granularity_of_one_gives_the_length_itself() -> None:
    forecast = PredictedLengths(hidden=True, granularity=1).forecast("r0", 77, 512)
    assert forecast is not None
    assert forecast.lower(0, 512) == forecast.quantile(0.99, 0, 512) == forecast.mean(0, 512) == 77


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"granularity": 200}, {"hidden": True, "granularity": -1}, {"hidden": True, "accuracy": 1.5}):
        with pytest.raises(InputError, match="lengths"):
            PredictedLengths(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="strides"):
        played({"hidden": True}, strides=True)
