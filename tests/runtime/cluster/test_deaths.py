"""`kill -9` of an agent's process in each phase of its work, in which it is held until it dies.

The phases are those of `benchmarks.cluster.phases`. `tests/runtime/scheduler/devices/test_deaths.py` does the same,
event by event, under the virtual clock.
"""

from __future__ import annotations

from benchmarks.cluster.phases import PHASES, phases


def test_a_kill_in_each_phase_loses_doubles_and_alters_nothing() -> None:
    outcome = phases(list(PHASES))
    assert outcome["wrong"] == []
    assert outcome["lies"] == [], "health did not notice"
    assert outcome["phases"].keys() == PHASES.keys() and outcome["kills"] >= len(PHASES)
    assert outcome["free"] == [outcome["capacity"]] * 3, "pages leaked"
    assert outcome["health"] == "ok" and outcome["requests"] > 0
