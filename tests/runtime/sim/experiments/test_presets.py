"""Every preset can be assembled, and generates the number of requests that it states."""

from __future__ import annotations

import pytest

from runtime.sim.experiments.presets import PRESETS, preset_named
from runtime.sim.experiments.run import assemble
from zoo.errors import InputError


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "scale"])
def test_presets_stand(name: str):
    preset = preset_named(name)
    assert preset.name == name
    assert len({case.x for case in preset.cases}) == len(preset.cases) and bool(preset.axis) == (len(preset.cases) > 1)
    for case in preset.cases:
        asked = case.scenario.asked  # how many requests come at Twitter's rates depends on those
        assert len(case.scenario.demand(0)) == asked.count or asked.kind == "twitter"
        for policy in case.scenario.policies.values():
            assert len(assemble(case.scenario, policy).nodes) == sum(case.scenario.cluster.servers)


def test_the_papers_cluster_and_load():
    scenario = preset_named("blockllm").cases[0].scenario
    assert (scenario.cluster.servers, scenario.cluster.gpu, scenario.cluster.net) == (
        (2, 2, 4, 4),
        "A100-80GB",
        "100gbps",
    )
    assert (scenario.asked.count, scenario.asked.seconds, scenario.apps.count, scenario.asked.longest) == (
        400,
        1200.0,
        20,
        1024,
    )


def test_a_million_on_a_thousand():
    scenario = preset_named("scale").cases[0].scenario
    assert (scenario.asked.count, sum(scenario.cluster.servers)) == (1_000_000, 1000)


def test_resized_keeps_the_rate():
    scenario = preset_named("blockllm").cases[0].scenario.resized(100, 10)
    assert (scenario.asked.count, scenario.asked.seconds, scenario.cluster.servers) == (100, 300.0, (4, 4, 2))
    with pytest.raises(InputError, match="no preset"):
        preset_named("nothing")
