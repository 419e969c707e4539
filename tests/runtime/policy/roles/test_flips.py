"""The device that changes its role can be spared, is of use in the other one, and may change (TI-24 to TI-26)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from runtime.policy.roles.flips import RoleUse, choose_role_change
from runtime.role_config import RoleChangeConfig, RoleName

CONFIG = RoleChangeConfig("spare", idle=0.1, spare=0.5, busy=0.9)
PAPER = RoleChangeConfig("idle", idle=0.1, busy=0.9)


def chosen(
    loads: Mapping[str, float], refused: Sequence[str] = (), config: RoleChangeConfig = CONFIG, **waited: float
) -> Any:
    """Choose among devices named after their roles, such as p1, d1 and b1, with these loads; b's of both kinds."""
    roles: Mapping[str, RoleName] = {"p": "prefill", "d": "decode", "b": "both"}
    uses = [
        RoleUse(name, roles[name[0]], 1.0 if name[0] == "d" else load, 0.0 if name[0] == "p" else load)
        for name, load in loads.items()
    ]
    shares: Any = waited
    found = choose_role_change(uses, shares, config, lambda device, role: device not in refused)
    return None if found is None else (found.device, found.role, found.cause)


@pytest.mark.parametrize(
    ("loads", "waited", "found"),
    [
        ({"p1": 0.05, "p2": 0.4, "d1": 0.95}, {}, ("p1", "decode", "TI-25")),
        ({"p1": 0.05, "p2": 0.02, "d1": 0.95}, {}, ("p2", "decode", "TI-25")),
        ({"p1": 0.02, "p2": 0.02, "d1": 0.95}, {}, ("p1", "decode", "TI-25")),
        ({"d1": 0.0, "d2": 0.4, "p1": 1.0}, {}, ("d1", "prefill", "TI-26")),
        ({"d1": 0.0, "d2": 0.4, "p1": 0.3}, {"prompts": 0.5}, ("d1", "prefill", "TI-26")),
        ({"d1": 0.0, "d2": 0.4, "p1": 0.3}, {"prompts": 0.4, "decodes": 1.0}, None),  # what waits is not for prompts
        ({"p1": 0.2, "p2": 0.3, "d1": 0.95}, {}, None),  # the other one could not take both loads
        ({"p1": 0.2, "p2": 0.2, "p3": 0.5, "d1": 0.95}, {}, ("p1", "decode", "TI-25")),
        ({"p1": 0.05, "p2": 0.05, "d1": 0.95, "d2": 0.8}, {}, None),  # on average they are not busy
        ({"p1": 0.0, "p2": 0.0, "d1": 0.0, "d2": 0.0}, {}, None),  # of no use
        ({"p1": 0.0, "d1": 0.95}, {}, None),  # the only one
        ({"b1": 0.0, "p1": 0.4, "d1": 0.95}, {}, None),  # what runs both helps already
        ({"b1": 0.4, "p1": 0.0, "d1": 0.95}, {"decodes": 1.0}, ("p1", "decode", "TI-25")),  # it takes the prompts
    ],
)  # fmt: skip
def test_a_device_that_can_be_spared_helps_where_it_is_of_use(loads: Any, waited: Any, found: Any) -> None:
    assert chosen(loads, **waited) == found


@pytest.mark.parametrize(
    ("loads", "found"),
    [
        ({"p1": 0.09, "p2": 1.0, "d1": 0.95}, ("p1", "decode", "TI-25")),  # whatever the other one has to do
        ({"p1": 0.1, "p2": 0.1, "d1": 0.95}, None),
        ({"d1": 0.09, "d2": 0.8, "p1": 0.95}, ("d1", "prefill", "TI-26")),
    ],
)  # fmt: skip
def test_the_papers_rule_takes_idle_devices_alone(loads: Any, found: Any) -> None:
    assert chosen(loads, config=PAPER) == found


def test_a_device_that_may_not_change_leaves_it_to_the_next_one() -> None:
    assert chosen({"p1": 0.01, "p2": 0.05, "d1": 1.0}, refused=("p1",)) == ("p2", "decode", "TI-25")
    assert chosen({"p1": 0.01, "p2": 0.4, "d1": 1.0}, refused=("p1", "p2")) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"watch": "on"},
        {"idle": 0.9},
        {"spare": 0.9},
        {"busy": 1.1},
        {"idle": -0.1},
        {"window_ms": 50},
        {"drain_ms": -1},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        RoleChangeConfig(**wrong)
