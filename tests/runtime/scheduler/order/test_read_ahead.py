"""What host memory is told to read: the models that are needed next, in the order of the queue, as far as they fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runtime.config import AgentConfig
from runtime.messages import LoadStages, ReadAhead
from tests.runtime.scheduler.order.test_planning import Planned, finished, swapping
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

#: Bytes of each model's own three parts; three more are of all.
OWN = 3000


def asked(host: int, models: int = 6, **order: Any) -> Planned:
    """Ask for models in turn, the later the number, the sooner the deadline; room for one of them at a time."""
    made = swapping(**({"models": models, "plan": "qlm", "read_ahead": True} | order))
    made.agent_config = AgentConfig(recompute_chunk=8, fetch_window=1, host_memory_bytes=host)
    made.loading = lambda: 400 * MS
    for number in range(models):
        one = request(f"s{number}", (1, 2, 3), f"m{number}", max_tokens=4, ignore_eos=True)
        made.ask(replace(one, arrival=MS, slo_ms=60_000 - 1_000 * number), at=MS)
    return made


def told(made: Planned) -> list[list[str]]:
    """Return the models of each message."""
    sent = [message for *_, message in made.sent if isinstance(message, ReadAhead)]
    return [[stage.model.partition("@")[0] for stage in message.stages] for message in sent]


@pytest.mark.parametrize(("host", "most"), [(2 * OWN, 2), (3 * OWN - 1, 2), (100 * OWN, 5)])
def test_the_next_models_are_read_as_far_as_they_fit(host: int, most: int) -> None:
    made = asked(host)
    made.ticks(10 * MS, 200 * MS)
    made.run(until=200 * MS)
    loads = [each.stages for *_, each in made.sent if isinstance(each, LoadStages)]
    assert [stage.model.partition("@")[0] for (stage,) in loads] == ["m0"], "the first that came"
    assert told(made)[-1] == ["m5", "m4", "m3", "m2", "m1"][:most], "the most urgent one first"
    finished(made)
    assert told(made)[-1] == [], "nothing waits any more"


def test_a_list_is_told_once() -> None:
    made = asked(2 * OWN)
    made.ticks(10 * MS, 300 * MS)
    made.run(until=300 * MS)
    assert len(told(made)) == 1


@pytest.mark.parametrize(("host", "order"), [(0, {}), (99 * OWN, {"read_ahead": False}), (99 * OWN, {"plan": "edf"})])
def test_nothing_is_read_ahead_without_host_memory_or_with_the_switch_off(host: int, order: dict[str, Any]) -> None:
    made = asked(host, **order)
    finished(made)
    assert not told(made)


def test_a_device_that_comes_back_is_told_again() -> None:
    made = asked(2 * OWN)
    made.ticks(10 * MS, 300 * MS)
    made.at(100 * MS, lambda: made.kill("d0"))
    made.run(until=300 * MS)
    assert len(told(made)) == 2
