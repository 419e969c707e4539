"""What a preset is, and what presets have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.sim.experiments.scenario import Scenario

#: Seconds before the first request, so that every policy has loaded what fits.
LOADED = 120.0
#: Controllers off: no scaling, no locality moves, no proactive migration.
STILL = {"scaling": False, "rearranging": False, "proactive": False}
KEPT_STILL = {f"control.{name}": "nothing moves while something else is measured" for name in STILL}


@dataclass(frozen=True, slots=True)
class Case:
    """One scenario of a preset. `x`: its place on the axis that the preset varies."""

    label: str
    scenario: Scenario
    x: float = 0.0


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of cases.

    Fields:
        axis: What varies over them; empty for one case.
        paper: The paper's numbers.
        differs: Settings in which ours, the first policy, is not as `zoo serve` ships it, each with the reason.
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    axis: str = ""
    paper: Mapping[str, Any] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
