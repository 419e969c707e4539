"""Which stages leave a device so that another fits, against brute force."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from runtime.policy.residency.eviction import ResidentStage, StageWeights, footprint_of, stages_to_unload


def stage(name: str, blocks: str, own: int = 0, **changes: object) -> ResidentStage:
    return ResidentStage(name, StageWeights(dict.fromkeys(blocks, 10), own), **changes)  # type: ignore[arg-type]


def names(found: list[ResidentStage] | None) -> list[str] | None:
    return None if found is None else [each.name for each in found]


def test_blocks_count_once_and_leave_with_their_last_stage() -> None:
    held = footprint_of([StageWeights({"a": 10, "b": 5}, 1), StageWeights({"a": 10, "c": 3}, 2)])
    assert held.nbytes == 21 and held.missing(StageWeights({"b": 5, "d": 7}, 4)) == 11
    held.remove(StageWeights({"a": 10, "b": 5}, 1))
    assert held.nbytes == 15


def test_what_fits_makes_nothing_leave() -> None:
    assert stages_to_unload([stage("one", "ab")], StageWeights({"a": 10, "c": 10}), 30, "furthest") == []


def test_stages_without_waiting_sequences_leave_first_then_the_one_needed_last() -> None:
    resident = [stage("soon", "a", next_use=1), stage("late", "b", next_use=7, used=3), stage("never", "c", used=9)]
    assert names(stages_to_unload(resident, StageWeights({"x": 10}), 30, "furthest", 0)) == ["never"]
    assert names(stages_to_unload(resident, StageWeights({"x": 10, "y": 10}), 30, "furthest", 0)) == ["never", "late"]
    assert names(stages_to_unload(resident, StageWeights({"x": 10}), 30, "lru", 0)) == ["soon"]


def test_pinned_stages_and_those_that_earlier_sequences_need_stay() -> None:
    resident = [stage("early", "a", next_use=1), stage("runs", "b", pinned=True)]
    assert stages_to_unload(resident, StageWeights({"x": 10}), 20, "furthest", 2) is None
    assert names(stages_to_unload(resident, StageWeights({"x": 10}), 20, "furthest", 0)) == ["early"]


def test_a_stage_whose_blocks_others_have_stays_if_its_leaving_frees_nothing() -> None:
    resident = [stage("shared", "ab", used=1), stage("same", "ab", pinned=True), stage("own", "c", used=3)]
    assert names(stages_to_unload(resident, StageWeights({"x": 10}), 30, "furthest")) == ["own"]


@pytest.mark.parametrize("order", ["furthest", "lru"])
def test_it_succeeds_where_any_set_would_and_lets_no_stage_go_in_vain(order) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        sizes = {block: rng.randrange(1, 9) for block in "abcdefg"}

        def weights(rng=rng, sizes=sizes) -> StageWeights:
            return StageWeights({b: sizes[b] for b in rng.sample("abcdefg", rng.randrange(1, 4))}, rng.randrange(3))

        resident = [
            ResidentStage(
                str(at), weights(), rng.choice((None, rng.randrange(6))), rng.randrange(9), rng.random() < 0.3
            )
            for at in range(5)
        ]
        incoming, limit, place = weights(), rng.randrange(5, 40), rng.randrange(6)
        found = stages_to_unload(resident, incoming, limit, order, place)
        free = [e for e in resident if not e.pinned and (e.next_use is None or e.next_use > place)]

        def held(gone, resident=resident, incoming=incoming) -> int:
            return footprint_of([incoming, *(each.weights for each in resident if each not in gone)]).nbytes

        possible = any(held(some) <= limit for count in range(len(free) + 1) for some in combinations(free, count))
        assert (found is not None) == possible, seed
        for each in found or ():
            assert each in free and held([one for one in found or () if one is not each]) > limit, seed
