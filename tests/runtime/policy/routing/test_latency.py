"""The latency of a hop, term by term as calculated by hand (BL-21)."""

from __future__ import annotations

from dataclasses import replace

from runtime.policy.profiles import BlockProfile, Grid, Line, LinkProfile
from runtime.policy.routing.latency import Candidate, Latency, RowWork, latency_of


def block(name: str, per_row: float, nbytes: int = 100, load: float = 7.0) -> BlockProfile:
    """Return a block that takes `per_row` seconds a row, whatever the context."""
    grid = Grid((1, 8), (1, 100), ((per_row, per_row), (8 * per_row, 8 * per_row)))
    return BlockProfile(name, nbytes, grid, Line((1,), (1.0,)), load)


#: One second for 100 bytes, two for 200.
NET = LinkProfile("host", "device", Line((0, 100), (0.0, 1.0)))
SLOW = LinkProfile("device", "host", Line((0, 100), (0.0, 4.0)))
ONE = RowWork(1, 50)


def test_each_term_by_hand():
    here = Candidate("here", block("b", 0.5), queue=(RowWork(8, 50), ONE))
    assert latency_of(here, ONE) == Latency(queue=4.5, compute=0.5, transfer=0.0, load=0.0)
    there = Candidate("there", block("b", 0.5), request_bytes=50, transfer=NET)
    assert latency_of(there, ONE) == Latency(0.0, 0.5, 0.5, 0.0)


def test_moving_what_it_remembers_is_part_of_the_transfer_and_hides_a_load():
    there = Candidate(
        "there", block("b", 0.5), request_bytes=50, transfer=NET, kv_seconds=2.0, resident=False, way_in=NET
    )
    assert latency_of(there, ONE) == Latency(0.0, 0.5, 2.5, 0.0)
    assert latency_of(replace(there, idle=False), ONE) == Latency(0.0, 0.5, 2.5, 1.0)


def test_loading_overlaps_the_transfer_on_an_idle_device_only():
    # T_swap = 50 bytes out at 4 s per 100, 100 bytes in at 1 s per 100 = 3 s; the request takes 0.5 s.
    loads = Candidate(
        "loads",
        block("b", 0.5),
        request_bytes=50,
        transfer=NET,
        resident=False,
        way_in=NET,
        evicted_bytes=50,
        way_out=SLOW,
    )
    assert latency_of(loads, ONE) == Latency(0.0, 0.5, 0.5, 2.5)
    assert latency_of(replace(loads, idle=False), ONE) == Latency(0.0, 0.5, 0.5, 3.0)
    assert latency_of(replace(loads, request_bytes=1000), ONE).load == 0.0
    assert latency_of(replace(loads, way_in=None), ONE).load == 2.0 + 7.0 - 0.5  # measured from disk


def test_a_surrogate_is_worth_its_load_only_for_work_that_is_large_enough():
    own = Candidate("own", block("b", 1.0))
    surrogate = Candidate("surrogate", block("s", 0.5, nbytes=200), resident=False, way_in=NET)
    for rows, cheaper in ((1, own), (8, surrogate)):
        assert min((own, surrogate), key=lambda each: latency_of(each, RowWork(rows, 50)).total) is cheaper
