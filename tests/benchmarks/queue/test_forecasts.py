"""The benchmark of forecasts, on a tiny model: all requests are compared, and shuffled forecasts explain less."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from statistics import stdev

import pytest

from benchmarks.queue.forecasts import covered, figures, oracle, replayed, run, shuffled
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from runtime.policy.slo.forecast import Forecast
from runtime.scheduler.order.forecasts import ForecastOutcome
from tests import checkpoints
from zoo.api import Zoo


@pytest.mark.parametrize("arrivals", ["waves", "poisson"])
def test_requests_are_compared_with_their_forecasts(arrivals: str, tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama", tokenizer=False)
    given = Namespace(requests=60, places=4, prompt=8, wave=20, seed=0, vocab=20, arrivals=arrivals)
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(folder, "m")
        options = ServeOptions(plan="edf", max_num_seqs=4)
        with (
            (tmp_path / "log").open("wb") as log,
            start_driver(zoo, options, choose(zoo, ["m"]), log=log.write) as driver,
        ):
            found = run(driver, ["m"], given, "wide")
    assert len(found) == 60
    assert replayed(tmp_path / "log") == found
    assert all(each.waited <= each.took and each.forecast.least <= each.forecast.most for each in found)
    assert figures(found, 20)["requests"] == 60
    told = oracle(found, 4)
    assert [each.seq for each in told] == [each.seq for each in found]
    assert max(each.tokens for each in found) <= 101 and figures(told, 20)["r2"] > 0.2
    assert sorted(each.forecast.end for each in shuffled(found, 0)) == sorted(each.forecast.end for each in found)


def test_the_share_within_has_the_error_of_waves() -> None:
    """Waves that are off by one error each tell as much as so many requests, however many they have."""
    shares = [1.0, 1.0, 0.5, 1.0, 0.0]
    told = Forecast(wait=0, end=5, sigma=1, unit=1, least=0, most=9)
    found = [
        ForecastOutcome(f"{wave} {at}", 100 * wave + at, 1, told, 1, 5 if at < 10 * share else 12)
        for wave, share in enumerate(shares)
        for at in range(10)
    ]
    share, error = covered(list(reversed(found)), 10)
    assert share == pytest.approx(0.7) and error == pytest.approx(stdev(shares) / 5**0.5)
    assert covered(found, 25)[1] == pytest.approx((1.0 - 0.4) / 2)
