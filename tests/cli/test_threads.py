"""Threads that wait give their cores away where cores are few, unless the user has said how they wait."""

from __future__ import annotations

import pytest

from cli.threads import yield_cores


@pytest.mark.parametrize(
    ("said", "cores", "found"),
    [
        ({}, 2, {"OMP_WAIT_POLICY": "passive"}),
        ({}, 64, {}),
        ({"OMP_WAIT_POLICY": "active"}, 2, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "5"}, 2, {"GOMP_SPINCOUNT": "5"}),
    ],
)
def test_what_is_set(said: dict[str, str], cores: int, found: dict[str, str]) -> None:
    yield_cores(said, cores)
    assert said == found
