"""The benchmark of forecasts, on a tiny model: all requests are compared, and shuffled forecasts explain less."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.queue.forecasts import figures, oracle, replayed, run, shuffled
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
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
    assert figures(found)["requests"] == 60
    told = oracle(found, 4)
    assert [each.seq for each in told] == [each.seq for each in found]
    assert max(each.tokens for each in found) <= 101 and figures(told)["r2"] > 0.2
    assert sorted(each.forecast.end for each in shuffled(found, 0)) == sorted(each.forecast.end for each in found)
