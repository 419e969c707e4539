"""A start over many models: what it reads does not grow with them, and damage is an error of the damaged model only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import event

from cli.serving.cluster import start_cluster
from cli.serving.models import all_on_demand
from cli.serving.options import ServeOptions
from cli.serving.source import ZooSource
from tests.checkpoints import make, make_lora
from zoo.api import Zoo
from zoo.errors import DamagedObject, InputError, ZooError

OPTIONS = ServeOptions(
    backend="inline", kv_cache_memory_bytes="1MiB", device_memory="4MiB", kernels="stock", max_model_len=128
)


@pytest.fixture
def zoo(tmp_path: Path) -> Iterator[Zoo]:
    """Two foundations of one config, one of another, and a LoRA."""
    with Zoo(tmp_path / "store") as zoo:
        for name, seed in (("base", 0), ("twin", 1)):
            zoo.ingest(make("llama", tmp_path / name, seed=seed), name)
        zoo.ingest(make("llama", tmp_path / "wide", num_key_value_heads=4), "wide")
        zoo.ingest(make_lora(tmp_path / "base", tmp_path / "lora"), "lora", "base")
        yield zoo


@contextmanager
def statements(zoo: Zoo) -> Iterator[list[str]]:
    """Collect the SQL of the block."""
    said: list[str] = []
    engine = zoo.store.catalog._database.engine
    event.listen(engine, "before_cursor_execute", lambda *given: said.append(given[2]))
    yield said


def test_the_start_lists_all_models_and_measures_one_foundation_per_config(zoo: Zoo) -> None:
    chosen = all_on_demand(zoo)
    assert chosen.names == ()
    assert [model.name for model in chosen.on_demand] == ["base", "lora", "twin", "wide"]
    assert [model.base for model in chosen.on_demand] == [None, "base", None, None]
    assert chosen.on_demand[0].created == int(zoo.models()[0].created.timestamp())
    assert chosen.measured == ("base", "wide")


def test_no_more_is_read_for_more_models(zoo: Zoo, tmp_path: Path) -> None:
    all_on_demand(zoo)
    with statements(zoo) as before:
        all_on_demand(zoo)
    count = len(before)
    for seed in range(3):
        zoo.ingest(make_lora(tmp_path / "base", tmp_path / f"more{seed}", seed=seed + 2), f"more{seed}", "base")
        zoo.ingest(make("llama", tmp_path / f"other{seed}", seed=seed + 2), f"other{seed}")
    with statements(zoo) as after:
        assert len(all_on_demand(zoo).on_demand) == 10
    assert count == len(after)
    assert not [said for said in after if "sum(" in said.lower()]  # sizes take a row per tensor of every model


def test_a_damaged_model_is_an_error_once_it_is_asked_for(zoo: Zoo) -> None:
    lost = zoo.model("lora").manifest.components[1].component.adapter
    assert lost is not None
    zoo.store.objects.path(lost.tensors[0][1]).unlink()
    zoo.store.blobs.path(_config(zoo, "wide")).unlink()
    chosen = all_on_demand(zoo)
    assert [model.name for model in chosen.on_demand] == ["base", "lora", "twin", "wide"]
    assert chosen.measured == ("base",)
    with start_cluster(zoo, OPTIONS, chosen, None, None) as driver:
        ZooSource(zoo).served(driver.load("base"))
        for name in ("lora", "wide"):
            with pytest.raises(ZooError):
                driver.load(name)


def test_no_foundation_that_can_be_read(zoo: Zoo, tmp_path: Path) -> None:
    for name in ("base", "wide"):
        zoo.store.blobs.path(_config(zoo, name)).unlink()
    with pytest.raises(DamagedObject):
        all_on_demand(zoo)
    with Zoo(tmp_path / "empty") as empty, pytest.raises(InputError, match="no model"):
        all_on_demand(empty)


def _config(zoo: Zoo, name: str) -> str:
    return next(side.blob for side in zoo.model(name).manifest.side_files if side.path == "config.json")
