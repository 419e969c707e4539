"""The choice between host memory and recomputing (QL-11): it flips with the times, and room comes first."""

from __future__ import annotations

from dataclasses import replace

from runtime.policy.kv.preemption import SwapTimes, swaps

#: 7B on an A100: 2,000 tokens of 0.5 MB over 25 GB/s each way, or 0.19 s of prefill.
TIMES = SwapTimes(out=0.04, back=0.04, overlap=0.0, recompute=0.19)
ROOM = {"a": 1000, "b": 1000}


def test_the_cheaper_way_is_taken() -> None:
    assert swaps("auto", TIMES, {"a": 500}, ROOM)
    assert not swaps("auto", replace(TIMES, recompute=0.08), {"a": 500}, ROOM)
    assert not swaps("auto", replace(TIMES, recompute=0.05), {"a": 500}, ROOM)


def test_what_runs_beside_steps_costs_nothing() -> None:
    dear = replace(TIMES, recompute=0.05)
    assert swaps("auto", replace(dear, overlap=0.04), {"a": 500}, ROOM)
    assert replace(dear, overlap=1.0).swap == 0.0


def test_without_room_on_every_device_nothing_is_kept() -> None:
    for mode in ("auto", "swap"):
        assert swaps(mode, TIMES, {"a": 1000, "b": 1000}, ROOM)
        assert not swaps(mode, TIMES, {"a": 500, "b": 1001}, ROOM)
        assert not swaps(mode, TIMES, {"a": 500, "c": 1}, ROOM)


def test_the_switch_overrules_the_times() -> None:
    assert swaps("swap", replace(TIMES, recompute=0.0), {"a": 500}, ROOM)
    assert not swaps("recompute", replace(TIMES, out=0.0, back=0.0), {"a": 500}, ROOM)
