"""Simulated devices copy K and V of sequences that give way to host memory and back, and are charged for it (QL-10)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.sim.cost.hardware import LINKS
from runtime.sim.experiments.run import Played, assemble, play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.run.loading import Host

#: One device with pages for about five requests at full length.
TIGHT: dict[str, Any] = {
    "cluster": {"servers": [1], "usable": 0.2, "weights": 0.95},
    "apps": {"count": 1, "foundations": ["llama-7b"]},
    "asked": {"count": 16, "seconds": 1.0, "prompts": "uniform:400-500", "answers": "uniform:400-500"},
}


def tight(host: int = 1 << 40, **changes: Any) -> Scenario:
    policy = {"host_memory_bytes": host, "page_layers": 8, "page_tokens": 64}
    modes = {mode: {**policy, "preemption_mode": mode} for mode in ("auto", "swap", "recompute")}
    return scenario_of("tight", {**TIGHT, "policies": modes} | changes)


def run(scenario: Scenario, mode: str, trace: Path | None = None) -> Played:
    return play(scenario, mode, scenario.demand(0), trace)


def test_a_copy_takes_the_time_of_its_bytes_on_the_link(tmp_path: Path) -> None:
    played = run(tight(), "swap", tmp_path / "trace")
    events = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    back = [event for event in events if event["ev"] == "kv.swap.in"]
    assert back and played.counts["resumed_tokens"] == 0 < played.counts["swapped_tokens"]
    for event in back:
        token = next(
            each for each in events if each["ev"] == "token" and each["seq"] == event["seq"] and each["t"] > event["t"]
        )
        assert token["t"] - event["t"] >= LINKS["pcie4"].busy_ns(event["nbytes"])


def test_what_host_memory_keeps_is_not_computed_again() -> None:
    kept, again = run(tight(), "swap"), run(tight(), "recompute")
    assert list(kept.ledger.tokens) == list(again.ledger.tokens)
    assert again.counts["resumed_tokens"] > 0 == again.counts["swapped_tokens"]
    assert kept.end < again.end


def test_without_host_memory_the_trace_is_that_of_recomputing(tmp_path: Path) -> None:
    run(tight(host=0), "auto", tmp_path / "auto")
    run(tight(host=0), "recompute", tmp_path / "recompute")
    run(tight(), "recompute", tmp_path / "switch")
    traces = {(tmp_path / name).read_bytes() for name in ("auto", "recompute", "switch")}
    assert len(traces) == 1


def test_kv_takes_room_from_weights_in_a_servers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, seen = tight(), []
    simulation = assemble(scenario, scenario.policies["swap"], None)
    (node,) = simulation.nodes.values()
    share = Host.share_memory

    def watched(host: Host, device: str, kv: int) -> None:
        share(host, device, kv)
        assert host._held <= max(host.memory - kv, 0)
        seen.append(kv)

    monkeypatch.setattr(Host, "share_memory", watched)
    node.loader.host.memory = 15_000_000_000
    simulation.run(scenario.demand(0).requests())
    assert max(seen) > 0 == seen[-1]
