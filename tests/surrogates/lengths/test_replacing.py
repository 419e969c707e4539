"""A predictor that replaces an older one does so at once or not at all (TI-11)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from surrogates.lengths.storing import ENDING, stored_predictor
from tests.checkpoints import make
from tests.surrogates.lengths import predictors
from zoo.api import Zoo
from zoo.catalog.writer import Writer
from zoo.errors import InputError, NameTaken, StoreFull
from zoo.manifest import ModelManifest

NAME = "org/m" + ENDING
PROMPT = (1, 2, 3)


@pytest.fixture
def zoo(tmp_path: Path) -> Zoo:
    opened = Zoo(tmp_path / "store")
    opened.ingest(make("llama", tmp_path / "m"), "org/m")
    return opened


def put(zoo: Zoo, seed: int, replacing: bool, target: ModelManifest | None = None) -> list[float]:
    """Store an untrained predictor; return what it forecasts."""
    predictors.put(zoo, "org/m", (0, 10, 20), seed, replacing, target)
    return forecast(zoo)


def forecast(zoo: Zoo) -> list[float]:
    return stored_predictor(zoo.store, zoo.model("org/m").manifest).masses([PROMPT])[0]


def test_a_new_one_takes_the_place_of_the_older(zoo: Zoo) -> None:
    first = put(zoo, 1, replacing=True)
    with pytest.raises(NameTaken):
        put(zoo, 2, replacing=False)
    assert forecast(zoo) == first
    assert put(zoo, 2, replacing=True) != first
    zoo.gc()
    zoo.verify()


def test_a_failure_loses_nothing(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    first = put(zoo, 1, replacing=True)
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_insert_files", lambda *_: (_ for _ in ()).throw(StoreFull("full")))
        with pytest.raises(StoreFull):
            put(zoo, 2, replacing=True)
    zoo.gc()
    assert forecast(zoo) == first


def test_what_is_no_predictor_is_not_replaced(zoo: Zoo, tmp_path: Path) -> None:
    zoo.ingest(make("llama", tmp_path / "y", seed=4), NAME)
    with pytest.raises(NameTaken, match="another model"):
        put(zoo, 1, replacing=True)
    assert zoo.model(NAME).kind != "lengths"


def test_a_target_that_changed_meanwhile_keeps_its_predictor(zoo: Zoo, tmp_path: Path) -> None:
    first = put(zoo, 1, replacing=True)
    zoo.ingest(make("llama", tmp_path / "z", seed=5), "org/z")
    with pytest.raises(InputError, match="replaced meanwhile"):
        put(zoo, 2, replacing=True, target=replace(zoo.model("org/z").manifest, name="org/m"))
    assert forecast(zoo) == first
