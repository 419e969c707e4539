"""The real scheduler over simulated devices: all requests finish, and runs repeat from the seed and from the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.scheduler.observe.replay_log import Diverged, replay
from runtime.sim.experiments.run import Played, assemble, play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.results.report import document_of
from runtime.sim.run.playback import Stalled
from zoo.errors import InputError

#: Few large pages: all of them are checked after every event.
PAGES = {"page_layers": 32, "page_tokens": 128}
SMALL: dict[str, Any] = {
    "cluster": {"servers": [2, 2], "disk": "nvlink3"},
    "apps": {"count": 5, "foundations": ["llama-7b"]},
    "asked": {"count": 40, "seconds": 10.0, "prompts": "uniform:8-64", "answers": "uniform:2-24"},
    "policies": {
        "blocks": {"placement": "partition", **PAGES},
        "pm": {"provision": "pm", **PAGES},
        "ps": {"provision": "ps", **PAGES},
    },
}


def small(**changes: Any) -> Scenario:
    return scenario_of("small", {**SMALL, **changes})


@pytest.mark.parametrize("policy", ["blocks", "pm", "ps"])
def test_every_request_gets_its_tokens_and_one_end(policy: str):
    scenario = small()
    demand = scenario.demand(0)
    played = play(scenario, policy, demand)
    assert list(played.ledger.tokens) == demand.answer.tolist()
    assert played.ledger.reasons == {"length": 40} and not played.ledger.errors
    assert all(
        at < first <= end
        for at, first, end in zip(played.ledger.arrived, played.ledger.first, played.ledger.ended, strict=True)
    )
    document = document_of(played)
    assert document["completed"] == 40 and 0 < document["utilisation"] < 1
    # Only chains that are cut over devices send data between them.
    assert (document["communication"]["inside"]["bytes"] > 0) == (policy == "blocks")


def test_books_and_queues_agree_after_every_event():
    scenario = small()
    simulation = assemble(scenario, scenario.policies["blocks"], None)
    scheduler = simulation._scheduler
    told = scheduler.handle

    class Checking:
        def handle(self, event: Any, now: int) -> Any:
            commands = told(event, now)
            scheduler.check()  # type: ignore[attr-defined]
            for node in simulation.nodes.values():
                node.agent.check()
            return commands

    simulation._scheduler = Checking()
    simulation.run(scenario.demand(1).requests())
    assert simulation.ledger.reasons == {"length": 40}


def test_the_scheduler_knows_which_devices_share_a_server():
    scenario = small()
    simulation = assemble(scenario, scenario.policies["blocks"], None)
    simulation.run(scenario.demand(0).requests())
    scheduler, network = simulation._scheduler, simulation.network
    servers = [each.facts.server for each in scheduler.devices]  # type: ignore[attr-defined]
    assert [servers.index(each) for each in servers] == [0, 0, 2, 2]
    assert [network.server_of(each.name) for each in scheduler.devices] == [0, 0, 1, 1]  # type: ignore[attr-defined]
    crossings = scheduler.control.crossings()  # type: ignore[attr-defined]
    assert 0 < crossings.crossings < crossings.hops  # cut over all four devices: one hop of three leaves its server


def test_one_seed_one_trace(tmp_path: Path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        play(small(), "blocks", small().demand(seed), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()
    events = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert [event["t"] for event in events] == sorted(event["t"] for event in events)
    assert sum(event["ev"] == "finish" for event in events) == 40


def recorded(tmp_path: Path) -> tuple[Played, Path]:
    scenario, log = small(), tmp_path / "log"
    return play(scenario, "blocks", scenario.demand(0), log=log, faults=[(3_000_000_000, "s1g0")]), log


def test_a_log_gives_the_same_commands_again(tmp_path: Path):
    played, log = recorded(tmp_path)
    assert replay(log) > 40
    assert played.ledger.reasons == {"length": 40}


def test_a_log_that_was_changed_gives_others(tmp_path: Path):
    _, log = recorded(tmp_path)
    lines = log.read_bytes().splitlines(keepends=True)
    arrivals = [number for number, line in enumerate(lines) if b'"AddRequest"' in line]
    log.write_bytes(b"".join(line for number, line in enumerate(lines) if number != arrivals[3]))
    with pytest.raises(Diverged):
        replay(log)
    log.write_bytes(b"".join(lines[:5]) + b"[1,2]\n")
    with pytest.raises(InputError, match="line 6"):
        replay(log)


@pytest.mark.parametrize("moment", [0, 1_000_000_000, 2_345_678_901, 6_000_000_000])
def test_nothing_is_lost_when_a_device_dies(moment: int):
    scenario = small()
    demand = scenario.demand(2)
    played = play(scenario, "blocks", demand, faults=[(moment, "s0g1"), (moment + 1_500_000_000, "s1g0")])
    assert list(played.ledger.tokens) == demand.answer.tolist()
    assert played.ledger.reasons == {"length": 40}


def test_strides_change_the_number_of_steps_and_hardly_the_time():
    whole: dict[str, Any] = {
        "cluster": {"servers": [1], "disk": "nvlink3"},
        "apps": {"count": 1, "foundations": ["llama-7b"]},
    }
    one = {"provision": "pm", "strides": True, "batch_wait_us": 0, **PAGES}
    results = {}
    for stride in (1, 8):
        scenario = small(**whole, policies={"one": {**one, "stride": stride}})
        results[stride] = document_of(play(scenario, "one", scenario.demand(0)))
    assert results[8]["tokens"] == results[1]["tokens"]
    assert results[8]["steps"] < 0.5 * results[1]["steps"]
    assert results[8]["latency"]["p50"] == pytest.approx(results[1]["latency"]["p50"], rel=0.3)


def halves(linger_us: int, control_us: float = 50.0) -> dict[str, Any]:
    """Run one device, on which sequences arrive while earlier ones are in a step; return the results."""
    whole: dict[str, Any] = {
        "cluster": {"servers": [1], "disk": "nvlink3", "control_us": control_us},
        "apps": {"count": 1, "foundations": ["llama-7b"]},
        "asked": {"kind": "poisson", "count": 8, "seconds": 1.0, "prompts": "32", "answers": "200"},
    }
    scenario = small(**whole, policies={"one": {"provision": "pm", "stride": 1, "batch_wait_us": linger_us, **PAGES}})
    return document_of(play(scenario, "one", scenario.demand(0)))


def test_rows_that_are_due_back_join_the_next_step():
    """The round trip takes 50 us; without the wait, rows that miss a step never join those in it."""
    with_it, without = halves(2000), halves(0)
    assert with_it["tokens"] == without["tokens"] == 1600
    assert with_it["steps"] < 0.7 * without["steps"]
    assert with_it["latency"]["p50"] < 0.75 * without["latency"]["p50"]


def test_rows_that_are_far_away_are_not_waited_for():
    """Negative control: a round trip above the limit. Only the first steps differ, until the round trip is known."""
    with_it, without = halves(2000, 5000.0), halves(0, 5000.0)
    assert with_it["steps"] == without["steps"]
    assert with_it["latency"] == without["latency"]


def test_what_is_forgotten_is_told():
    class Silent:
        def handle(self, event: Any, now: int) -> Any:
            return []

    scenario = small(pace={"tick": 0, "report": 0})
    simulation = assemble(scenario, scenario.policies["pm"], None)
    simulation._scheduler = Silent()
    with pytest.raises(Stalled, match="40 requests are alive"):
        simulation.run(scenario.demand(0).requests())


def test_time_before_the_first_request_does_not_count():
    """A later start changes only what was loaded by then; throughput and the number in the system count from it."""
    asked = {"count": 40, "seconds": 10.0, "prompts": "uniform:8-64", "answers": "uniform:2-24"}
    soon, later = (
        document_of(play(made := small(asked={**asked, "after": after}), "pm", made.demand(0))) for after in (60, 600)
    )
    assert later["virtual_seconds"] == pytest.approx(soon["virtual_seconds"], rel=1e-6)
    assert later["throughput_tokens"] == pytest.approx(soon["throughput_tokens"], rel=1e-6)
    assert later["in_system"] == pytest.approx(soon["in_system"], rel=1e-6)
    little = sum(later["latency"]["mean"] for _ in range(40)) / later["virtual_seconds"]
    assert later["in_system"] == pytest.approx(little, rel=1e-6)
