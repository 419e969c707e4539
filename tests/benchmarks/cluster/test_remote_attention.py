"""The benchmarks of lent attention run, and both processes together find what one finds."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.cluster import loan_shipping
from benchmarks.cluster.remote_attention import Shape, measure
from tests.runtime.engine.compiled import needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize("link", ["native", "python"])
def test_two_processes_find_what_one_finds(link: str) -> None:
    found = measure(Shape(context=512, kv_heads=2, dtype="float32", layers=2, link=link), rounds=2)
    assert found["error"] < 1e-6 and found["link"] == link
    assert all(each > 0 for each in (*found["ratio"], *found["layer_ms"], *found["round_trip_ms"]))


def test_queries_and_pages_find_the_same() -> None:
    given = argparse.Namespace(tokens=[1, 4], lent=[32, 64], here=32, kv_heads=2, dtype="float32", layers=2, rounds=1)
    rows = loan_shipping.measure(given)
    assert [(row["tokens"], row["lent"]) for row in rows] == [(1, 32), (1, 64), (4, 32), (4, 64)]
    assert all(row["error"] == 0 and set(row["ms"]) == {"query", "pages", "cheapest"} for row in rows)
