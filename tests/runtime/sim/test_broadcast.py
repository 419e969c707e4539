"""Broadcast dispatch in the simulator (BL-23): all requests finish, and the same seed gives the same run."""

from __future__ import annotations

import msgspec

from runtime.scheduler.observe.replay_log import digest_of
from runtime.sim.experiments.run import assemble
from runtime.sim.experiments.scenario import Scenario, scenario_of


def scenario(dispatch: str) -> Scenario:
    """Return a scenario with six small devices that hold a model's chain in parts, each part two or three times."""
    return scenario_of(
        "styles",
        {
            "cluster": {"servers": [2, 2, 2], "gpu": "A10", "weights": 0.45},
            "apps": {"count": 1, "foundations": ["llama-7b"]},
            "asked": {"count": 40, "seconds": 10.0, "prompts": "uniform:8-64", "answers": "uniform:2-24"},
            "policies": {
                "blocks": {"placement": "replicate", "dispatch": dispatch, "page_layers": 32, "page_tokens": 128}
            },
        },
    )


def played(dispatch: str) -> tuple[list[str], dict[str, int], int]:
    """Run the scenario; return digests of the scheduler's commands, ends by reason, and hops won."""
    one = scenario(dispatch)
    simulation = assemble(one, one.policies["blocks"], None)
    scheduler = simulation._scheduler
    told, said = scheduler.handle, []

    def handle(event, now):  # type: ignore[no-untyped-def]
        commands = told(event, now)
        said.append(f"{now} {msgspec.json.encode(event)!r} {digest_of(commands)}")
        scheduler.check()  # type: ignore[attr-defined]
        return commands

    scheduler.handle = handle  # type: ignore[method-assign]
    ledger = simulation.run(one.demand(3).requests())
    return said, ledger.reasons, scheduler.offers.settled  # type: ignore[attr-defined]


def test_the_same_seed_gives_the_same_and_everything_is_answered() -> None:
    first, again, placed = played("broadcast"), played("broadcast"), played("placed")
    assert first == again
    assert first[1] == placed[1] == {"length": 40}
    assert first[2] > 10 and placed[2] == 0
