"""Kills by phase, by the benchmark, of `zoo serve` with a tiny model: nothing lost, doubled or altered."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.queue.kills import Totals, bodies, compare, unkilled
from benchmarks.queue.phases import PhaseLives, Victim, phases_of
from benchmarks.queue.servers import serving
from runtime.queueing.broker import INTERACTIVE
from tests import checkpoints, rabbitmq
from tests.runtime.server.harness import eventually
from zoo.api import Zoo


@pytest.mark.parametrize(
    ("phase", "victim", "options"),
    [("fetch", "server", ()), ("journal", "agent", ("--agents", "2", "--backend", "processes"))],
)
def test_a_process_is_killed_in_a_phase(phase: str, victim: Victim, options: tuple[str, ...], tmp_path: Path) -> None:
    folder, store, totals = checkpoints.make("llama", tmp_path / "llama"), str(tmp_path / "store"), Totals()
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(folder, "m", None)
    given = bodies(0, 2, "m", 8, 200, 20)  # long enough for several writes of the journal on a busy machine, too
    with serving(store, "m", options) as server:
        expected = unkilled(server, given, None, totals)
    lives = PhaseLives(0, given, phase, victim, 2 if phase == "fetch" else 1)
    lives.run(store, "m", [*options, "--queue", str(tmp_path / "queue")])
    compare(lives, expected, totals)
    assert lives.reached == (2 if phase == "fetch" else 1)
    assert (totals.requests, totals.lost, totals.doubled, totals.altered, totals.errors) == (2, 0, 0, 0, [])
    if phase == "fetch":
        assert lives.next_token, "streams were under way, and the next server went on with them"


@pytest.mark.rabbitmq
def test_a_broker_is_killed_before_it_has_a_request(rabbit: rabbitmq.Broker, tmp_path: Path) -> None:
    """Its client is refused, and comes back."""
    folder, store, totals = checkpoints.make("llama", tmp_path / "llama"), str(tmp_path / "store"), Totals()
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(folder, "m", None)
    given = bodies(0, 1, "m", 8, 8, 20)
    options = ("--queue", str(tmp_path / "queue"), "--broker", rabbit.url)
    with serving(store, "m", options) as server:
        expected = unkilled(server, given, None, totals)
        time.sleep(rabbitmq.SETTLED)
    lives = PhaseLives(0, given, "offer", "broker", 1, rabbit)
    lives.run(store, "m", options)
    compare(lives, expected, totals)
    assert lives.reached == 1 and lives.refused > 0
    assert (totals.requests, totals.lost, totals.doubled, totals.altered, totals.errors) == (1, 0, 0, 0, [])
    assert eventually(lambda: rabbit.unacknowledged(INTERACTIVE) == 0, 30)


def test_phases_are_those_that_a_process_passes() -> None:
    assert "offer" in phases_of("server", brokered=True) and "accept" not in phases_of("server", brokered=True)
    assert {"swap-out", "swap-in", "load"} <= set(phases_of("broker", brokered=True))
    assert not {"swap-out", "swap-in", "load", "fetch", "offer", "ack"} & set(phases_of("agent", brokered=False))
