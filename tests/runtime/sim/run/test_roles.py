"""Roles in the simulator (TI-04): the scheduler of `zoo serve` hands off between simulated devices, repeatably."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from zoo.errors import InputError

ROLES = ["prefill", "decode", "decode"]


def scenario(**policy: Any) -> Scenario:
    return scenario_of(
        "apart",
        {
            "cluster": {"servers": [3], "control_us": 20.0},
            "apps": {"count": 3, "foundations": ["llama-7b"]},
            "asked": {"count": 30, "seconds": 10.0, "prompts": "uniform:100-400", "answers": "uniform:20-60"},
            "policies": {"apart": {"roles": ROLES, **policy}, "together": {}},
        },
    )


def test_prompts_and_decoding_are_apart_and_runs_are_repeatable(tmp_path: Path) -> None:
    made = scenario()
    traces = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for trace in traces:
        played = play(made, "apart", made.demand(1), trace)
        assert played.counts["moves"] == 30 and played.counts["recomputed"] == 0
    text = traces[0].read_text()
    assert text == traces[1].read_text()
    assert text.count('"role"') == 0 and text.count('"phase":"transfer"') == 30
    prompts = [line for line in text.splitlines() if '"block.hop"' in line and '"start":0,' in line]
    assert prompts and all('"to":"s0g0"' in line for line in prompts)
    assert play(made, "together", made.demand(1)).counts["moves"] == 0


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"roles": ["prefill", "decode"]}, "names 2 roles for 3 devices"),
        ({"roles": ["prefill", "decode", "idle"]}, "'idle' is no role"),
        ({"roles": ["decode"] * 3}, "prompts and decoding both need a device"),
        ({"roles": "prefill,decode,both"}, "a list of roles"),
        ({"dispatch": "broadcast"}, "roles need hops"),
    ],
)
def test_roles_that_cannot_be_are_refused(policy: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        made = scenario(**policy)
        play(made, "apart", made.demand(1))
