"""The simulated comparison of orders: every case runs, and an order of groups loads less than a strict queue."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.simulated.many_queues import cases, run

GIVEN = Namespace(requests=30, devices=2)


@pytest.mark.parametrize("what", ["interactive", "parts", "mega", "bursts", "mixed", "slo"])
def test_cases_are_scenarios(what: str) -> None:
    found = dict(cases(what, GIVEN))
    assert len(found) > 1 and all("qlm" in made.policies for made in found.values())


def test_groups_load_less_than_a_strict_queue() -> None:
    made = dict(cases("interactive", GIVEN))["5% interactive"]
    ours, strict = run(made, "qlm", 0), run(made, "fcfs", 0)
    assert ours["errors"] == strict["errors"] == 0
    assert 2 * ours["loads"] < strict["loads"]
    assert ours["requests_per_second"] > 1.5 * strict["requests_per_second"]
    assert ours["until_nine_tenths"] > strict["until_nine_tenths"]


def test_kinds_of_devices_come_in_turn() -> None:
    made = dict(cases("mixed", Namespace(requests=30, devices=4)))["one A10 of two"]
    assert [server.gpu.name for server in made.cluster.cluster().servers] == ["A100-80GB", "A10"] * 2
