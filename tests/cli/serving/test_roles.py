"""`--roles`: one role per agent, both phases, and what it is not combined with (TI-04)."""

from __future__ import annotations

from typing import Any

import pytest

from cli.serving.options import gather
from zoo.errors import InputError


def options(roles: str | None, agents: int = 2, **given: Any) -> Any:
    return gather(None, {"agents": agents, "roles": roles, **given})


def test_each_agent_gets_its_role_and_models_stay_loaded() -> None:
    made = options("prefill, decode,both", agents=3, device_memory="4GiB")
    cluster = made.cluster()
    assert cluster.roles == (("agent-0", "prefill"), ("agent-1", "decode"), ("agent-2", "both"))
    assert cluster.residency == "fixed" and not made.on_demand
    assert options(None, agents=2).cluster().roles == ()


@pytest.mark.parametrize(
    ("roles", "given", "why"),
    [
        ("prefill,decoding", {}, "'decoding' is no role; they are both, prefill, decode"),
        ("prefill", {}, "--roles names 1 roles for 2 agents"),
        ("prefill,decode,both", {}, "--roles names 3 roles for 2 agents"),
        ("decode,decode", {}, "no agent for prompts"),
        ("prefill,prefill", {}, "no agent that decodes"),
        ("prefill,decode", {"agents": 1}, "--roles has no effect on one device"),
        ("prefill,decode", {"executor": "dense"}, "the dense executor runs whole chains"),
        ("prefill,decode", {"speculation": "exact"}, "roles and speculation exclude each other"),
        ("prefill,decode", {"dispatch": "broadcast"}, "roles need hops that the scheduler places"),
        ("prefill,decode", {"plan": "edf"}, "roles and plan edf exclude each other"),
    ],
)
def test_what_cannot_be_is_refused(roles: str, given: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        options(roles, **{"agents": 2, **given})
