"""Kills by phase, by the benchmark, of `zoo serve` with a tiny model: nothing lost, doubled or altered."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.queue.kills import Totals, bodies, compare, unkilled
from benchmarks.queue.phases import PhaseLives
from benchmarks.queue.servers import serving
from tests import checkpoints
from zoo.api import Zoo


@pytest.mark.parametrize(
    ("phase", "victim", "options"),
    [("fetch", "server", ()), ("journal", "agent", ("--agents", "2", "--backend", "processes"))],
)
def test_a_process_is_killed_in_a_phase(phase: str, victim: str, options: tuple[str, ...], tmp_path: Path) -> None:
    folder, store, totals = checkpoints.make("llama", tmp_path / "llama"), str(tmp_path / "store"), Totals()
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(folder, "m", None)
    given = bodies(0, 2, "m", 8, 48, 20)
    with serving(store, "m", options) as server:
        expected = unkilled(server, given, None, totals)
    lives = PhaseLives(0, given, phase, victim, 2 if phase == "fetch" else 1)
    lives.run(store, "m", [*options, "--queue", str(tmp_path / "queue")])
    compare(lives, expected, totals)
    assert lives.reached == (2 if phase == "fetch" else 1)
    assert (totals.requests, totals.lost, totals.doubled, totals.altered, totals.errors) == (2, 0, 0, 0, [])
