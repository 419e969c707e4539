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
    ],
)
def test_what_cannot_be_is_refused(roles: str, given: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        options(roles, **{"agents": 2, **given})


def test_roles_follow_the_load_where_that_is_asked_for() -> None:
    assert options("prefill,decode").cluster().role_changes.watch == "off"
    made = options("prefill,decode", role_changes="idle", role_watch={"window_ms": 5000}).cluster()
    assert (made.role_changes.watch, made.role_changes.window_ms) == ("idle", 5000)
    for given, why in (
        ({"roles": None, "role_changes": "spare"}, "--role-changes has no effect without roles: give --roles"),
        ({"roles": "prefill,decode", "role_watch": {"idle": 0.2}}, "give --role-changes"),
        ({"roles": "prefill,decode", "role_changes": "spare", "role_watch": {"busy": 2}}, "busy is at most 1"),
    ):
        with pytest.raises(InputError, match=why):
            options(**given).cluster()  # type: ignore[arg-type]


def test_short_remainders_run_where_they_decode_where_that_is_asked_for() -> None:
    assert options("prefill,decode").cluster().decode.local_prefill == 0
    assert options("prefill,decode", local_prefill=64).cluster().decode.local_prefill == 64
    for given, why in (
        ({"roles": None, "local_prefill": 64}, "--local-prefill has no effect without roles: give --roles"),
        ({"roles": "prefill,decode", "local_prefill": 64, "prefix_caching": "off"}, "leave out --prefix-caching off"),
        ({"roles": "prefill,decode", "local_prefill": -1}, "local_prefill is at least 0"),
    ):
        with pytest.raises(InputError, match=why):
            options(**given).cluster()  # type: ignore[arg-type]
