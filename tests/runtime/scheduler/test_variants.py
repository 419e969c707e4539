"""Variants as data: what may take a block's place, what it is worth, and what must not be shared or chained."""

from __future__ import annotations

import pytest

from runtime.engine.counted import counting_model
from runtime.scheduler.variants import ScoredPair, variants_of
from runtime.stages import BlockUse, Variant

A = counting_model("a", "1 2* 3 4* 5 6").chain(1, 3, 5)
B = counting_model("b", "1 7* 8* 9 4* 5 6").chain(1, 4, 6)
C = counting_model("c", "1 2* 3 11* 12 6").chain(1, 3, 5)
SIZES = {use.block: 10 * (use.hi - use.lo) for chain in (A, B, C) for use in chain.uses}


def pair(a: BlockUse, b: BlockUse, score: float) -> ScoredPair:
    return ScoredPair(a, b, score)


def blocks(variant: Variant) -> list[str]:
    return [use.block for use in variant.chain.uses]


def test_one_block_or_several_take_others_places() -> None:
    pairs = [pair(A.uses[1], B.uses[1], 0.99), pair(C.uses[2], A.uses[2], 0.985)]
    found = variants_of(A, pairs, SIZES, 0.95)
    assert [variant.score for variant in found] == [0.99, 0.985, pytest.approx(0.99 * 0.985)]
    assert blocks(found[2]) == [A.uses[0].block, B.uses[1].block, C.uses[2].block, A.uses[3].block]
    assert [(use.lo, use.hi) for use in found[0].chain.uses] == [(0, 1), (1, 4), (4, 6), (6, 7)]  # B's run is longer
    assert found[0].chain.spec.kv_layers == 3
    assert {variant.of for variant in found} == {A.version} and {variant.chain.model for variant in found} == {"a"}
    assert len({variant.chain.loaded_as for variant in found} | {A.loaded_as}) == 4


def test_a_score_under_the_least_is_not_taken_neither_alone_nor_together() -> None:
    pairs = [pair(A.uses[1], B.uses[1], 0.97), pair(A.uses[2], C.uses[2], 0.979)]
    assert [variant.score for variant in variants_of(A, pairs, SIZES, 0.975)] == [0.979]
    assert [len(variants_of(A, pairs, SIZES, least)) for least in (0.9, 0.96, 0.98)] == [3, 2, 0]


def test_pairs_that_meet_in_a_third_block_are_not_chained() -> None:
    """BL-06: B's block is like A's, C's is like B's; that says nothing of A and C."""
    pairs = [pair(A.uses[1], B.uses[1], 0.99), pair(B.uses[1], C.uses[2], 0.99)]
    found = variants_of(A, pairs, SIZES, 0.9)
    assert [C.uses[2].block in blocks(variant) for variant in found] == [False]


def test_a_score_of_the_same_block_behind_other_blocks_is_another_use() -> None:
    elsewhere = BlockUse(A.uses[1].block, 1, 3, 1, "behind something else")
    assert variants_of(A, [pair(elsewhere, B.uses[1], 0.99)], SIZES, 0.9) == []


def test_k_and_v_are_the_chains_own_before_the_first_other_block_only() -> None:
    found = variants_of(A, [pair(A.uses[1], B.uses[1], 0.99)], SIZES, 0.9)[0].chain
    assert found.uses[0].domain == A.uses[0].domain
    domains = {use.domain for use in found.uses[1:]}
    assert len(domains) == 3 and not domains & {use.domain for chain in (A, B, C) for use in chain.uses}
    assert found.version != A.version


def test_the_fewest_bytes_come_first_of_equal_scores_and_only_so_many() -> None:
    pairs = [pair(A.uses[1], B.uses[1], 0.98), pair(A.uses[2], C.uses[2], 0.98)]
    found = variants_of(A, pairs, SIZES, 0.97, most=1)
    assert len(found) == 1 and C.uses[2].block in blocks(found[0])
