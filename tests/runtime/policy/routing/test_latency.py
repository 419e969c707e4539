"""The latency of a hop, term by term as calculated by hand (BL-21)."""

from __future__ import annotations

from dataclasses import replace

from runtime.policy.profiles import BlockProfile, Grid, Line
from runtime.policy.routing.latency import Candidate, Latency, RowWork, latency_of


def block(name: str, per_row: float, nbytes: int = 100, load: float = 7.0) -> BlockProfile:
    """Return a block that takes `per_row` seconds a row, whatever the context."""
    grid = Grid((1, 8), (1, 100), ((per_row, per_row), (8 * per_row, 8 * per_row)))
    return BlockProfile(name, nbytes, grid, Line((1,), (1.0,)), load)


ONE = RowWork(1, 50)


def test_each_term_by_hand():
    here = Candidate("here", block("b", 0.5), queue=(RowWork(8, 50), ONE))
    assert latency_of(here, ONE) == Latency(queue=4.5, compute=0.5, transfer=0.0, load=0.0)
    there = Candidate("there", block("b", 0.5), transfer=0.5)
    assert latency_of(there, ONE) == Latency(0.0, 0.5, 0.5, 0.0)


def test_a_prompt_costs_its_chunks_each_beside_the_rows_of_the_batch():
    grid = Grid((1, 8), (1, 100), ((0.5, 0.5), (4.0, 4.0)))
    measured = BlockProfile("b", 100, grid, Line((1, 10), (0.1, 1.0)), 7.0)
    prompt = RowWork(0, 25, prompt=25)
    assert latency_of(Candidate("alone", measured, chunk=10), prompt).compute == 2 * 1.0 + 0.5
    assert latency_of(Candidate("beside", measured, joins=8, chunk=10), prompt).compute == 2.5 + 3 * 4.0
    queued = Candidate("queued", measured, queue=(RowWork(8, 50, prompt=10),), chunk=10)
    assert latency_of(queued, ONE).queue == 4.0 + 1.0


def test_the_transfer_hides_a_load_on_an_idle_device_only():
    loads = Candidate("loads", block("b", 0.5), transfer=0.5, swap=3.0)
    assert latency_of(loads, ONE) == Latency(0.0, 0.5, 0.5, 2.5)
    assert latency_of(replace(loads, idle=False), ONE) == Latency(0.0, 0.5, 0.5, 3.0)
    assert latency_of(replace(loads, transfer=10.0), ONE).load == 0.0


def test_a_surrogate_is_worth_its_load_only_for_work_that_is_large_enough():
    own = Candidate("own", block("b", 1.0))
    surrogate = Candidate("surrogate", block("s", 0.5, nbytes=200), swap=2.0)
    for rows, cheaper in ((1, own), (8, surrogate)):
        assert min((own, surrogate), key=lambda each: latency_of(each, RowWork(rows, 50)).total) is cheaper
