"""The benchmark of interactive requests behind a batch, on a tiny model: all sides run, and answer alike."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from benchmarks.queue.head_of_line import SIDES, measure
from tests import checkpoints
from zoo.api import Zoo


def test_every_side_answers_alike(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama", tokenizer=False)
    given = Namespace(
        batch=12,
        interactive=3,
        places=2,
        prompt=8,
        tokens=(8, 24),
        answer=4,
        factor=3.0,
        rounds=2,
        vocab=20,
        seed=0,
        slo=None,
        within=None,
        roles=None,
        lending="off",
        kv_mib=1024,
    )
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(folder, "m")
        sides = tuple(SIDES)
        found = measure(zoo, ["m"], sides, given)
    assert set(found["sides"]) == set(sides)
    assert all(len(runs) == 2 for runs in found["sides"].values())
    assert found["throughput_ratio"]["off"] == 1.0
    assert all(run["same"] and len(run["interactive_seconds"]) == 3 for runs in found["sides"].values() for run in runs)
