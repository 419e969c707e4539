"""Killed agents and failed reads while models swap: nothing is lost or altered (`benchmarks.residency.faults`)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.residency.family import make
from benchmarks.residency.faults import faults
from tests import checkpoints


def test_kills_and_failed_reads_alter_nothing(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama", tokenizer=False, num_hidden_layers=4)
    names = make(folder, tmp_path / "store", 4, 2)
    made = faults(tmp_path / "store", names, kills=1, reads=2, seed=1, agents=1, load_kills=1)
    assert made["wrong"] == []
    assert (made["kills"], made["load_kills"], made["failed_reads"]) == (1, 1, 2)
    assert made["answered"] > 12 and made["unloads"] > 0, "models were to come and go"
