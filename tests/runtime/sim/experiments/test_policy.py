"""Policies of scenarios that simulated clusters cannot follow are refused."""

from __future__ import annotations

import pytest

from runtime.sim.experiments.policy import policy_of
from zoo.errors import InputError


def test_negotiated_loans_are_refused() -> None:
    with pytest.raises(InputError, match=r"policies\.lending\.mode: simulated clusters have no managers of the pool"):
        policy_of({"lending": {"mode": "negotiated"}}, 2)
    assert policy_of({"lending": {"mode": "planned"}}, 2).scheduler.lending.mode == "planned"
