"""Requests come when they are due, or when one of so many clients has its answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.results.recorder import RunRecorder
from runtime.sim.run.clock import EventClass, VirtualClock
from runtime.sim.run.playback import Playback
from runtime.sim.workload.requests import Demand
from runtime.types import SamplingParams, SequenceRequest, TokenEvent

PAGES = {"page_layers": 32, "page_tokens": 128}
CLUSTER = {"servers": [2], "disk": "nvlink3"}
POLICIES = {"blocks": PAGES, "pm": {"provision": "pm", "engines": {}}}


def scenario() -> Scenario:
    return scenario_of("clients", {"cluster": CLUSTER, "apps": {"count": 1, "foundations": ["llama-7b"]},
                                   "policies": POLICIES})  # fmt: skip


def asked(made: Scenario, at: list[float], clients: int) -> Demand:
    count = len(at)
    lengths = np.full(count, 16, dtype=np.int64), 8 + np.arange(count, dtype=np.int64) % 5
    times = np.array([round(each * 1e9) for each in at], dtype=np.int64)
    return Demand(made.models()[:1], times, np.zeros(count, dtype=np.int64), *lengths, clients=clients)


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("clients", [1, 3])
def test_the_next_request_of_clients_comes_when_one_has_ended(policy: str, clients: int) -> None:
    made = scenario()
    demand = asked(made, [100.0] * 12, clients)
    ledger = play(made, policy, demand).ledger
    assert list(ledger.tokens) == demand.answer.tolist()
    begun, ended = list(ledger.arrived), sorted(ledger.ended)
    assert begun[:clients] == [100 * 10**9] * clients
    assert begun[clients:] == ended[: 12 - clients]
    free = play(made, policy, replace(demand, clients=0)).ledger
    assert list(free.arrived) == [100 * 10**9] * 12


def test_clients_ask_no_sooner_than_a_request_is_due() -> None:
    made = scenario()
    ledger = play(made, "blocks", asked(made, [100.0, 100.0, 500.0, 500.0, 500.0], 2)).ledger
    assert list(ledger.arrived[:4]) == [100 * 10**9] * 2 + [500 * 10**9] * 2
    assert ledger.arrived[4] == min(ledger.ended[2:4])


def test_a_request_arrives_when_its_client_asks() -> None:
    """Deadlines count from there: two clients with requests of 5 ns each."""
    clock, ledger, arrived = VirtualClock(), RunRecorder(), list[tuple[int, int]]()

    def arrive(request: SequenceRequest) -> None:
        arrived.append((clock.now, request.arrival))
        end = TokenEvent(request.seq, request.request, 0, None, finish="stop")
        clock.at(clock.now + 5, EventClass.TICK, (ledger.add_events, [end], clock.now + 5))

    playback = Playback(clock, ledger, arrive)
    names = [f"r{number}" for number in range(6)]
    playback.begin((SequenceRequest(name, name, "m", (1,), SamplingParams(1), arrival=3) for name in names), 2)
    playback.play(None)
    assert arrived == [(at, at) for at in (3, 3, 8, 8, 13, 13)]
