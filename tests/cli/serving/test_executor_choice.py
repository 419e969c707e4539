"""Choice of the executor: paged unless measured to be slower on this kind of device; it must serve every model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cli.app
from cli.serving.executor_choice import KIND, measure_executors
from cli.serving.models import choose
from runtime.config import EngineConfig
from runtime.engine.profiling.document import device_key, hardware_of
from tests import checkpoints
from zoo.api import Zoo
from zoo.records import Document


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Zoo(tmp_path / "store") as zoo:
        for seed, name in enumerate(("one", "two")):
            checkpoints.make("llama", tmp_path / name, seed=seed)
            zoo.ingest(tmp_path / name, name)
    return tmp_path / "store"


def tell(zoo: Zoo, name: str, ratio: object, key: str | None = None) -> None:
    """Store what a measurement would store."""
    here = device_key("cpu", hardware_of("cpu"))
    with zoo.store.catalog.writing() as writer:
        writer.put_document(Document(KIND, name, key or here, {"dense_over_paged": ratio}))


def test_what_was_measured_decides(store: Path) -> None:
    with Zoo(store) as zoo:
        assert choose(zoo, ["one"]).executor == "paged"
        tell(zoo, "one", 0.5, key="cpu: another one, 2 threads")
        assert choose(zoo, ["one"]).executor == "paged", "another machine's figures say nothing here"
        tell(zoo, "one", 0.8)
        assert choose(zoo, ["one"]).executor == "dense"
        assert choose(zoo, ["one"], executor="paged").executor == "paged"
        assert choose(zoo, ["one", "two"]).executor == "dense"
        tell(zoo, "two", 1.4)
        assert choose(zoo, ["one", "two"]).executor == "paged"
        tell(zoo, "one", "damaged")
        assert choose(zoo, ["one"]).executor == "paged"


def test_measuring_times_both_and_keeps_it(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Zoo(store) as zoo:
        document = measure_executors(zoo, "one", EngineConfig(kv_cache_memory_bytes=8 << 20))
        assert set(document["seconds"]) == {"paged", "dense"}
        assert all(seconds > 0 for rows in document["seconds"].values() for seconds in rows.values())
        wanted = "dense" if document["dense_over_paged"] < 1.0 else "paged"
        assert choose(zoo, ["one"]).executor == wanted
    with pytest.raises(SystemExit) as ended:
        cli.app.main(
            ["profile", "two", "--executors", "--kv-cache-memory-bytes", "8MiB", "--store", str(store), "--json"]
        )
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["model"] == "two"
