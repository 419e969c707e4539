"""The benchmark of more models than fit, in turn, on a tiny family: all sides answer alike, and bytes agree."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.queue.tail_models import SIDES, make_load, measure
from benchmarks.residency.family import make
from tests import checkpoints
from tests.benchmarks.residency.test_more_than_fit import vary_norms


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    root = tmp_path_factory.mktemp("tail")
    folder = checkpoints.make("llama", root / "llama", num_hidden_layers=4, tie_word_embeddings=True)
    vary_norms(folder)
    models = make(folder, root / "store", 5, 0)
    return Namespace(
        store=root / "store", names=models, fit=2, each=3, places=4, prompt=4, answer=2, rate=200.0, slo=(60.0, 600.0),
        pages="1MiB", vocabulary=90, side=["fcfs", "edf-strict", "qlm"], serve=[], rounds=1, seed=0,
        settle=0.0,
    )  # fmt: skip


def test_requests_are_for_models_in_turn(given: Namespace) -> None:
    load = make_load(given.names, given)
    assert [ask.model for ask in load.asks[:7]] == [*given.names, *given.names[:2]]
    assert load.slos == (60.0,) * 5 + (600.0,) * 5 + (60.0,) * 5
    assert len(load.asked_of(given.names[2])) == 3


def test_every_side_has_the_models_own_answers_and_loads_what_is_missing(given: Namespace, tmp_path: Path) -> None:
    found = measure(given.store, given.names, given)
    assert set(found["sides"]) <= set(SIDES)
    for runs in found["sides"].values():
        (run,) = runs
        assert run["own"] and run["met"] == 1.0
        assert run["loads"] >= 3 and run["loaded"] == run["missing"] > 0
