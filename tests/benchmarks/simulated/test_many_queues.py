"""The simulated comparison of orders: every case runs, and an order of groups loads less than a strict queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulated.many_queues import run
from benchmarks.simulated.queue_cases import EXPERIMENTS, PARTS, cases, scenario
from benchmarks.simulated.queue_plots import draw
from runtime.sim.experiments.run import play


@pytest.mark.parametrize("what", EXPERIMENTS)
def test_cases_are_scenarios(what: str) -> None:
    found = dict(cases(what, 30, 2))
    assert found and all("qlm" in made.policies for made in found.values())


def test_groups_load_less_than_a_strict_queue() -> None:
    made = dict(cases("interactive", 30, 2))["5% interactive"]
    ours, strict = run(made, "qlm", 0), run(made, "fcfs", 0)
    assert ours["errors"] == strict["errors"] == 0
    assert 2 * ours["loads"] < strict["loads"]
    assert ours["requests_per_second"] > 1.5 * strict["requests_per_second"]
    assert ours["until_nine_tenths"] > strict["until_nine_tenths"]


def test_kinds_of_devices_come_in_turn() -> None:
    made = dict(cases("mixed", 30, 4))["one A10 of two"]
    assert [server.gpu.name for server in made.cluster.cluster().servers] == ["A100-80GB", "A10"] * 2


def test_each_part_differs_from_the_whole_by_a_setting() -> None:
    made = dict(cases("parts", 30, 2))["all models"]
    whole = made.policies["qlm"]
    assert [name for name, policy in made.policies.items() if policy == whole] == ["qlm"]
    assert list(made.policies) == list(PARTS)


def test_long_prompts_are_answered() -> None:
    made = dict(cases("mega", 20, 2))["20% mega prompts"]
    assert max(made.demand(0).prompt) > 6000 and run(made, "qlm", 0)["errors"] == 0


def test_documents_become_a_plot(tmp_path: Path) -> None:
    row = {"requests_per_second": 2.0, "interactive": 0.9, "all": 1.0}
    runs = {label: {"qlm": [row, row], "fcfs": [row]} for label in ("1% interactive", "5% interactive")}
    made = draw({"interactive": {"runs": runs}}, tmp_path / "orders.png")
    assert made.read_bytes().startswith(b"\x89PNG")


def test_reading_ahead_makes_loads_shorter() -> None:
    """Four models for one device, in a server that keeps what it has read: the next ones are read before their turn."""
    made = scenario({name: PARTS[name] for name in ("qlm", "read-ahead")}, 40, 1, host_cache=2 * 10**11, models=4)
    plain, ahead = (play(made, name, made.demand(0)) for name in ("qlm", "read-ahead"))
    assert ahead.ledger.load_ns / ahead.ledger.loads < 0.6 * plain.ledger.load_ns / plain.ledger.loads
    assert ahead.disk_bytes == plain.disk_bytes, "each model is read once"
