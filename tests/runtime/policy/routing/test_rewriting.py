"""Exact or rewriting, by profiles and load: examples worked out by hand (BL-21)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.policy.profiles import BlockProfile, DeviceProfile, Grid, Line, chain_of
from runtime.policy.routing.rewriting import Side, decide, rows_beside
from runtime.types import ModelSpec


def chain(name: str, first: float, more: float) -> BlockProfile:
    """Return a chain that takes `first` seconds for one row and `more` for each further one, whatever the context."""
    rows = (1, 2, 3, 4)
    grid = Grid(rows, (1, 100), tuple((first + more * (row - 1),) * 2 for row in rows))
    return BlockProfile(name, 100, grid, Line((1,), (1.0,)), 7.0)


EXACT, REWRITING = chain("exact", 1.0, 0.1), chain("rewriting", 1.5, 0.2)


@pytest.mark.parametrize(
    ("exact", "beside", "chosen", "terms"),
    [
        (0, 0, "exact", ((0, 1.0), (0, 1.5))),  # nothing runs: the faster one
        (
            0,
            3,
            "rewriting",
            ((1.2, 1.0), (0, 2.1)),
        ),  # the base's batch runs anyway, and joining it costs less than another batch
        (3, 0, "exact", ((0, 1.3), (1.9, 1.5))),  # the exact model's batch runs anyway
        (1, 3, "exact", ((1.2, 1.1), (1.5, 2.1))),  # both run anyway
    ],
)
def test_the_batch_that_runs_anyway_is_joined_when_that_costs_less(exact, beside, chosen, terms):
    choice = decide(Side("exact", EXACT, exact), Side("rewriting", REWRITING, beside), 9)
    assert choice.chosen.name == chosen
    assert [(each.queue, each.compute) for each in choice.latencies] == [pytest.approx(each) for each in terms]
    assert all((each.transfer, each.load) == (0, 0) for each in choice.latencies)


def test_of_equals_the_exact_one_is_taken_and_another_table_is_another_choice():
    same = replace(EXACT, block="rewriting")
    assert decide(Side("exact", EXACT, 0), Side("rewriting", same, 0), 9).chosen.name == "exact"
    faster = chain("rewriting", 0.9, 0.1)
    assert decide(Side("exact", EXACT, 0), Side("rewriting", faster, 0), 9).chosen.name == "rewriting"


def spec(name: str, kind: str, base: str | None = None) -> ModelSpec:
    return ModelSpec(name, 2, 16, 256, 320, kind=kind, base=base)


def test_rows_that_share_a_batch():
    specs = [
        spec("base", "foundation"),
        spec("lora", "lora", "base"),
        spec("fine", "full", "base"),
        spec("near", "delta", "base"),
        spec("on fine", "lora", "fine"),
        spec("other", "foundation"),
        spec("other's", "lora", "other"),
    ]
    rows = {"base": 1, "lora": 2, "fine": 4, "near": 8, "on fine": 16, "other": 32, "other's": 64}
    assert rows_beside("near", specs, rows) == 1 + 2 + 8 == rows_beside("base", specs, rows)
    assert rows_beside("fine", specs, rows) == 4 + 16
    assert rows_beside("other's", specs, rows) == 96
    assert rows_beside("gone", specs, rows) == 0 == rows_beside("near", specs, {})


def test_a_chain_is_the_sum_of_its_blocks():
    profile = DeviceProfile("cpu", (EXACT, REWRITING), ())
    whole = chain_of(profile, "both", ["exact", "rewriting", "exact"])
    assert whole.decode.at(1, 50) == pytest.approx(3.5) and whole.decode.at(4, 50) == pytest.approx(1.3 * 2 + 2.1)
    assert (whole.nbytes, whole.load_seconds, whole.prefill.at(1)) == (300, 21.0, 3.0)
    with pytest.raises(KeyError):
        chain_of(profile, "more", ["exact", "unknown"])
    with pytest.raises(ValueError, match="same axes"):
        chain_of(
            DeviceProfile("cpu", (EXACT, replace(REWRITING, prefill=Line((2,), (1.0,)))), ()),
            "both",
            ["exact", "rewriting"],
        )
    with pytest.raises(ValueError, match="same axes"):
        chain_of(profile, "none", [])
