"""A server takes up predictors that are made, replaced or removed while it runs, and counts its predictions (TI-10)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import gather
from runtime.cluster.driver.driver import ClusterDriver
from runtime.engine.catalog import length_predictors
from runtime.engine.catalog.length_predictors import StoredPredictors
from runtime.grammars.checking import GrammarChecker
from runtime.server.metrics import Metrics
from runtime.types import SamplingParams, SequenceRequest
from surgery.models.remove import remove
from surrogates.lengths.storing import ENDING
from tests.checkpoints import make
from tests.surrogates.lengths.predictors import put
from zoo.api import Zoo

MODELS = ("org/m", "org/other")


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    opened = Zoo(tmp_path / "store")
    for seed, name in enumerate(MODELS):
        opened.ingest(make("llama", tmp_path / f"m{seed}", seed=seed), name)
    put(opened, "org/m", (0, 10, 20), 1, replace=False)
    return opened


def asked(seq: str, model: str = "org/m", *, given: bool = False) -> SequenceRequest:
    return SequenceRequest(seq, seq, model, (5, 6, 7), SamplingParams(max_tokens=3, ignore_eos=given))


@contextmanager
def serving(zoo: Zoo) -> Iterator[ClusterDriver]:
    options = gather(None, {"lengths": "sequential", "decode_admission": "peak"})
    with start_driver(zoo, options, choose(zoo, list(MODELS), None, options.executor, "cpu")) as driver:
        yield driver


def shown(driver: ClusterDriver) -> dict[str, float]:
    lines = [
        line.split()
        for line in Metrics(driver, GrammarChecker()).text().decode().splitlines()
        if not line.startswith("#")
    ]
    return {
        name.removeprefix("blockzoo:").removesuffix("_total"): float(value) for name, value in lines if "{" not in name
    }


def test_what_is_made_while_it_serves_is_used(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_predictors, "_LOOK", 0.0)
    with serving(zoo) as driver:
        list(driver.run([asked("a"), asked("b", "org/other"), asked("c", given=True)]))
        before = shown(driver)
        assert (before["lengths_predicted"], before["lengths_not_predicted"]) == (1, 2)
        assert before["length_prediction_seconds"] > 0
        put(zoo, "org/other", (0, 5), 2, replace=False)
        list(driver.run([asked("d", "org/other")]))
        assert shown(driver)["lengths_predicted"] == 2
        remove(zoo.store, "org/m" + ENDING)
        list(driver.run([asked("e")]))
        after = shown(driver)
    assert (after["lengths_predicted"], after["lengths_not_predicted"]) == (2, 3)


def test_the_newest_forecasts_and_the_older_one_if_it_is_broken(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    predictors = StoredPredictors(zoo.store, MODELS, clock=lambda: now[0])

    def edges() -> tuple[int, ...]:
        (found,) = predictors.forecasts([asked("a")])
        assert found is not None
        return found.edges

    put(zoo, "org/m", (0, 7), 2, replace=True)
    now[0] = 0.5
    assert edges() == (0, 10, 20), "the catalogue is read once a second"
    now[0] = 1.5
    assert edges() == (0, 7)
    remove(zoo.store, "org/m" + ENDING)
    zoo.ingest(make("llama", zoo.store.root.parent / "no", seed=9), "org/m" + ENDING)
    with caplog.at_level(logging.WARNING):
        for now[0] in (3.0, 5.0):
            assert edges() == (0, 7)
    assert len([each for each in caplog.records if "as before" in each.getMessage()]) == 1
