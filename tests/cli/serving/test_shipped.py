"""What the figures call ours is what `zoo serve` ships; where a figure needs something else, its preset says so."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from cli.serving.options import ServeOptions
from runtime.sim.experiments.policy import Policy
from runtime.sim.experiments.presets import PRESETS, preset_named


def served(devices: int) -> dict[str, Any]:
    """The configurations of `zoo serve --device cuda --agents DEVICES`, by the setting's name."""
    options = ServeOptions(device="cuda", agents=devices).settled()
    return flat({**asdict(options.cluster()), **asdict(options.agent())})


def flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def simulated(policy: Policy) -> dict[str, Any]:
    return flat({**asdict(policy.scheduler), **asdict(policy.agent)})


@pytest.mark.parametrize("name", PRESETS)
def test_ours_is_what_is_served(name: str):
    preset = preset_named(name)
    for case in preset.cases:
        devices = sum(case.scenario.cluster.servers)
        ours = simulated(next(iter(case.scenario.policies.values())))
        expected = served(max(devices, 2))  # one simulated device is not run in the scheduler's thread either
        expected["devices"] = devices
        assert ours.keys() == expected.keys()
        differing = {setting for setting in ours if ours[setting] != expected[setting]}
        assert differing == set(preset.differs), "a preset names what it changes of the shipped settings, and why"


def test_figures_that_compare_provisioning_change_nothing():
    for name in ("blockllm", "blockllm-load", "blockllm-apps", "blockllm-table2"):
        assert not preset_named(name).differs
