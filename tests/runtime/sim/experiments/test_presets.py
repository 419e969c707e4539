"""Every preset can be assembled, and generates the number of requests that it states."""

from __future__ import annotations

import pytest

from runtime.sim.experiments.engines import deploy
from runtime.sim.experiments.presets import PRESETS, preset_named
from runtime.sim.experiments.run import assemble, play
from runtime.sim.results.report import document_of
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
            devices = sum(case.scenario.cluster.servers)
            if policy.engines is None:
                assert len(assemble(case.scenario, policy).nodes) == devices
            else:
                assert len(deploy(case.scenario, policy).devices) == devices


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


def test_figure_7_comes_out_of_the_simulator():
    """The hop model that all runs use, in its two readings: only the one with the whole context fits the paper."""
    preset = preset_named("blockllm-figure7")
    paper = preset.paper["figure 7"]
    found = {
        case.label: document_of(play(case.scenario, "blocks", case.scenario.demand(0)))["parts"]
        for case in preset.cases
    }
    assert found["context"]["compute"] == pytest.approx(paper["compute"], abs=0.03)
    assert found["context"]["between_servers"] == pytest.approx(paper["between_servers"], abs=0.03)
    assert found["new"]["between_servers"] < 0.01
