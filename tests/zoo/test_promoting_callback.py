"""`ZooCallback` promotes the checkpoints that pass, keeps what is live, and leaves the training as it is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import AutoTokenizer

from surgery.evaluation import promotion
from tests.checkpoints import make
from tests.zoo.test_integrations import full, names, trainer, weights
from zoo import Zoo
from zoo.errors import InputError
from zoo.integrations import ZooCallback

pytest.importorskip("lm_eval", reason="the eval extra is not installed")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("made") / "base", num_hidden_layers=2)


@pytest.fixture
def store(base: Path, tmp_path: Path) -> Path:
    with Zoo(tmp_path / "zoo_store") as zoo:
        zoo.ingest(base)
    return tmp_path / "zoo_store"


def changes(store: Path) -> list[tuple[str, str]]:
    with Zoo(store) as zoo, zoo.store.catalog.reading() as reader:
        return [(change.act, change.targets[0].model) for change in reversed(reader.alias_changes("prod"))]


def test_a_training_is_bit_for_bit_the_same_with_promotions(base: Path, store: Path, tmp_path: Path) -> None:
    ends = []
    for to in (None, "prod"):
        torch.manual_seed(0)
        more = {} if to is None else {"promote_to": to, "promote_if": ["library_ppl<=1e300"], "promote_limit": 1}
        run = trainer(full(base), tmp_path / f"run-{to}", ZooCallback(store, f"run-{to}", strict=True, **more))
        run.processing_class = AutoTokenizer.from_pretrained(base)  # written with each checkpoint
        run.train()
        ends.append((weights(run.model), torch.rand(3), random.random(), numpy.random.rand()))
    (plain, *drawn), (promoted, *drawn_too) = ends
    assert all(torch.equal(tensor, promoted[key]) for key, tensor in plain.items())
    assert torch.equal(drawn[0], drawn_too[0])
    assert changes(store) == [("promote", "run-prod@step-2"), ("promote", "run-prod@step-4")]


def test_only_what_passes_is_promoted_and_what_is_live_is_kept(
    base: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scores = {"run@step-2": 0.5, "run@step-4": 0.4}
    seeded: list[Any] = []

    def measured(zoo: Zoo, name: str, *rest: Any, **more: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        seeded.append(name)
        return {"results": {"results": {"t": {"acc,none": scores[name]}}}}

    monkeypatch.setattr(promotion, "evaluate_stored", measured)
    callback = ZooCallback(store, "run", keep_last=1, promote_to="prod", promote_if=["t>=live"], strict=True)
    with caplog.at_level("INFO"):
        trainer(full(base), tmp_path / "run", callback).train()
    assert seeded == ["run@step-2", "run@step-2", "run@step-4"]
    assert changes(store) == [("promote", "run@step-2")]
    with Zoo(store) as zoo:
        assert names(zoo) == ["base", "run@step-2", "run@step-4"]  # the live one stays, although keep_last is 1
    assert (
        "prod stays: run@step-4 does not pass" in caplog.text and "run@step-2 stays: 'run@step-2' cannot" in caplog.text
    )


def test_a_measurement_that_fails_ends_no_training(
    base: Path, store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = ZooCallback(store, "run", promote_to="prod", promote_if=["no_such_task>=1"])
    trainer(full(base), tmp_path / "run", callback).train()
    assert changes(store) == [] and "run@step-4 was not promoted to prod" in caplog.text
    with Zoo(store) as zoo:
        assert names(zoo) == ["base", "run@step-2", "run@step-4"]


@pytest.mark.parametrize(
    "wrong", [{"promote_if": []}, {"promote_if": ["t"]}, {"promote_to": "-x", "promote_if": ["t>=1"]}]
)
def test_wrong_settings_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ZooCallback("store", "run", **{"promote_to": "prod", **wrong})
