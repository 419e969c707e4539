"""The benchmark of starts on a store of many models, on a tiny family: all are listed, and those asked for answer."""

from __future__ import annotations

from pathlib import Path

from benchmarks.residency.family import make
from benchmarks.residency.many_models import measure
from tests import checkpoints


def test_every_model_is_listed_and_answers(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama")
    names = make(folder, tmp_path / "store", 0, 5)
    found = measure(tmp_path / "store", names, 1, 2, ("--device-memory", "1GiB", "--kv-cache-memory-bytes", "64MiB"))
    assert found["models"] == 6
    assert len(found["first_answer_seconds"]) == 2
    assert found["resident_bytes"] > 0
