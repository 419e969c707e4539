"""More models than fit, in the simulator: the scheduler's own residency decides; budgets hold, and all is answered."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.sim.cost.hardware import GPUS
from runtime.sim.experiments.run import assemble, play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.models.family import family_of
from runtime.sim.results.report import document_of

PAGES = {"page_layers": 32, "page_tokens": 128}


def swapping(loads: str = "beside", host_cache: int = 0, pages: str = "fixed", **policy: Any) -> Scenario:
    """Six private models of 13.5 GB, requested in turns, on one device that holds two of them."""
    return scenario_of(
        "swapping",
        {
            "cluster": {
                "servers": [1], "disk": "nvlink3", "weights": 0.4, "loads": loads, "host_cache": host_cache,
                "pages": pages,
            },
            "apps": {"count": 6, "foundations": ["llama-7b"]},
            "asked": {"count": 60, "seconds": 20.0, "prompts": "uniform:8-64", "answers": "uniform:2-24"},
            "policies": {"one": {"provision": "pm", **PAGES, **policy}},
        },
    )  # fmt: skip


@pytest.mark.parametrize("loads", ["beside", "stop"])
@pytest.mark.parametrize("eviction", ["furthest", "lru"])
@pytest.mark.parametrize("pages", ["fixed", "rest"])
def test_every_request_is_answered_and_weights_stay_below_the_limit(loads: str, eviction: str, pages: str):
    scenario = swapping(loads, eviction=eviction, pages=pages)
    simulation = assemble(scenario, scenario.policies["one"])
    node = simulation.nodes["s0g0"]
    told, seen = simulation._scheduler.handle, list[int]()

    class Checking:
        def handle(self, event: Any, now: int) -> Any:
            counts, weights = node.agent.pages(), node.engine.memory().weights
            used = (counts.capacity - counts.free) * node.engine.page_bytes
            assert weights <= node.weights and weights + used <= scenario.cluster.usable_bytes(GPUS["A100-80GB"])
            seen.append(counts.capacity)
            return told(event, now)

    simulation._scheduler = Checking()
    demand = scenario.demand(0)
    ledger = simulation.run(demand.requests())
    assert ledger.reasons == {"length": 60} and list(ledger.tokens) == demand.answer.tolist()
    assert ledger.loads > 6, "models left and came back"
    assert (len(set(seen)) == 1) == (pages == "fixed"), "pages get what weights leave"


def test_fixed_residency_serves_only_what_fits():
    document = document_of(play(scenario := swapping(residency="fixed"), "one", scenario.demand(0)))
    assert 0 < document["completed"] < 60 and document["errors"]


def test_a_memory_that_keeps_spares_the_disk():
    forgets, keeps = (
        document_of(play(scenario := swapping(host_cache=room), "one", scenario.demand(0))) for room in (0, 10**12)
    )
    assert forgets["loads"]["disk_bytes"] == forgets["loads"]["bytes"]
    scenario = swapping()
    every = family_of(scenario.apps.apps(), scenario.policies["one"].cutting).nbytes
    assert keeps["loads"]["disk_bytes"] <= every < keeps["loads"]["bytes"]


def test_loads_stop_steps_where_they_do_live():
    """Both at one load: a step that waits for a load ends later, and nothing else differs."""
    beside, stop = (
        document_of(play(scenario := swapping(loads), "one", scenario.demand(0))) for loads in ("beside", "stop")
    )
    assert stop["latency"]["mean"] > beside["latency"]["mean"]
    assert stop["tokens"] == beside["tokens"]


def test_pages_get_what_weights_leave():
    """The only model needs 13.5 of at most 28.8 GB for weights: the rest is for K and V."""
    small = scenario_of("one", {"cluster": {"servers": [1], "weights": 0.4}, "apps": {"count": 1}})
    large = scenario_of("many", {"cluster": {"servers": [1], "weights": 0.4}, "apps": {"count": 20}})
    pages = [assemble(each, each.policies["blocks"]).nodes["s0g0"].engine for each in (small, large)]
    usable = small.cluster.usable_bytes(GPUS["A100-80GB"])
    one, many = (engine.page_capacity * engine.page_bytes for engine in pages)
    assert usable - 13.6e9 < one < usable - 13.4e9
    assert many == pytest.approx(0.6 * usable, rel=0.01)
