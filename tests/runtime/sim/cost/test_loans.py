"""Costs of attention to lent K and V, by arithmetic: bytes, break-evens, and a maximum instead of a sum."""

from __future__ import annotations

import pytest

from runtime.sim.cost.hardware import GPUS, LinkSpec
from runtime.sim.cost.loans import (
    EXTRA_NS,
    LentWork,
    attending_ns,
    least_lent,
    pulled_ns,
    query_bytes,
    result_bytes,
    travel_ns,
    waiting_ns,
)
from runtime.sim.models.shapes import SHAPES

A100 = GPUS["A100-80GB"]
LINK = LinkSpec("link", 100e9, 10_000)
B13, B70 = SHAPES["llama-13b"], SHAPES["llama2-70b"]


def work(queries: int, lent: int, layers: int = 1) -> LentWork:
    made = LentWork(layers)
    made.add_row(queries, lent)
    return made


def test_a_decoding_row_sends_fewer_bytes_than_k_and_v_from_2_and_13_tokens_on() -> None:
    """IL-27: LLaMA2-13B and LLaMA2-70B, whose 64 heads share 8 of K and V."""
    assert (query_bytes(B13, 1), result_bytes(B13, 1), B13.kv_bytes) == (10_240, 21_120, 20_480)
    assert (query_bytes(B70, 1), result_bytes(B70, 1), B70.kv_bytes) == (16_384, 33_792, 4_096)
    assert (least_lent(B13), least_lent(B70)) == (2, 13)


def test_bytes_grow_with_queries_and_not_with_lent_tokens() -> None:
    one, far, many = (travel_ns(B13, work(queries, lent, 40), LINK) for queries, lent in ((1, 9), (1, 10**6), (64, 9)))
    assert one == far == 40 * (2 * 10_000 + 102 + 211)
    assert many == 40 * (2 * 10_000 + 6_554 + 13_517)


def test_a_creditor_reads_lent_tokens_at_its_own_bandwidth_and_computes_pairs_of_chunks() -> None:
    per_token = B13.kv_bytes * 1e9 / (2039e9 * 0.6)
    assert attending_ns(B13, work(1, 50_000, 40), A100) == pytest.approx(40 * 50_000 * per_token)
    chunk = attending_ns(B13, work(2048, 50_000, 40), A100)
    assert chunk == pytest.approx(40 * 2048 * 50_000 * 4 * 5120 * 1e9 / (312e12 * 0.5))
    two = work(1, 50_000, 40)
    two.add_row(1, 10_000)
    assert attending_ns(B13, two, A100) == pytest.approx(40 * 60_000 * per_token)


def test_a_step_waits_for_the_slowest_creditor_beyond_its_own_attention() -> None:
    """IL-29: a maximum, not a sum."""
    extra = 32 * EXTRA_NS
    assert waiting_ns([5e6, 9e6], 4e6, 32) == 5e6 + extra
    assert waiting_ns([5e6, 9e6], 9.5e6, 32) == extra


def test_pulling_costs_bytes_of_every_lent_token() -> None:
    near, far = pulled_ns(B70, 80, 100, LINK), pulled_ns(B70, 80, 100_000, LINK)
    assert near == 80 * (10_000 + 4_096) and far == 80 * (10_000 + 4_096_000)
    assert travel_ns(B70, work(1, 100_000, 80), LINK) < far / 100
