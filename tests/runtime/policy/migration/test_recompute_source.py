"""What the front of a move starts from, by bytes; and where both ends meet when inputs and pages share the link.

The latter is compared with brute force.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from runtime.policy.migration.cost import Costs, finish_time
from runtime.policy.migration.recompute_source import Front, RecomputeRun, front_of

#: The second half of a Llama-2-7B in half precision: 4096 wide, 16 layers with as many heads of K and V.
HALF = RecomputeRun(lo=33, hop=33, tokens=100, keeps=1 << 30, input_bytes=2 * 4096, kv_bytes=16 * 2 * 2 * 4096)


def test_a_chains_beginning_starts_from_tokens() -> None:
    assert front_of(RecomputeRun(0, 0, 100)) == Front("tokens")
    assert front_of(RecomputeRun(0, 0, 100, virtual=True)).origin == "none"


def test_what_is_kept_is_used_where_it_is_fewer_bytes() -> None:
    assert front_of(HALF) == Front("inputs")
    assert front_of(replace(HALF, virtual=True)) == Front("inputs")  # virtual positions have hidden states, too
    grouped = replace(HALF, kv_bytes=2 * 2 * 1024)  # one layer with a quarter of the heads
    assert front_of(grouped).origin == "none" and "8192 bytes a token, K and V 4096" in front_of(grouped).reason
    assert front_of(replace(HALF, kv_bytes=HALF.input_bytes)).origin == "none"
    assert front_of(replace(HALF, input_bytes=0)).origin == "none"  # their width is not known


def test_who_asks_for_no_copies_gets_them_however_dear() -> None:
    assert front_of(replace(HALF, kv_bytes=1), copy=False) == Front("inputs")


def test_without_them_upstream_is_charged() -> None:
    assert front_of(replace(HALF, keeps=0)) == Front(
        "none", "what came into component 33 is not kept: 33 components would run again", 33 * 100
    )
    inside = front_of(replace(HALF, hop=17))  # the stage begins earlier in the chain, and would run again from there on
    assert (inside.origin, inside.upstream) == ("none", 16 * 100)


@pytest.mark.parametrize("seed", range(200))
def test_both_ends_meet_where_the_shared_link_and_the_front_are_done_soonest(seed: int) -> None:
    rng = random.Random(seed)
    row, page, width = rng.choice((0.1, 1.0, 7.0)), rng.choice((0.3, 1.0, 5.0)), rng.choice((1, 4))
    costs = Costs(
        width,
        width,
        lambda context, tokens: row * tokens / width,
        page,
        inputs_group=page * rng.choice((0.05, 0.5, 0.99, 1.0, 3.0)),
    )
    tokens = rng.randrange(1, 60) * width
    total = tokens // width

    def both(place: int) -> float:
        front = costs.inputs_group + place * row if place else 0.0
        return max(front, (total - place) * page + place * costs.inputs_group)

    best = min(both(place) for place in range(total + 1))
    found = finish_time(tokens, costs)
    assert math.isclose(found.seconds, best) and math.isclose(both(found.groups), best)
    if costs.inputs_group >= page:
        assert found.groups == 0


def test_inputs_of_a_second_chunk_travel_while_the_first_runs() -> None:
    """Two chunks of four groups: the front waits only for the first chunk's inputs."""
    costs = Costs(4, 16, lambda context, tokens: float(tokens), math.inf, inputs_group=1.0)
    assert finish_time(32, costs).seconds == 4.0 + 32.0
