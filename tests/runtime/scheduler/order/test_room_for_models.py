"""Running sequences that give way to a model that has to be loaded (QL-13); more is in `test_planning`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runtime.scheduler.order.evictions import Evictions
from tests.runtime.scheduler.order.test_planning import finished, swapping
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request


def test_evictions_that_are_off_do_not_look_for_what_is_in_the_way() -> None:
    def find() -> None:
        raise AssertionError("looked")

    nothing: Any = None
    Evictions(nothing, nothing, nothing, evicts=False).block_load(nothing, find, nothing)


def test_only_the_first_that_waits_for_a_device_may_have_others_give_way() -> None:
    made, seen = swapping(patience=2_000), dict[str, bool]()
    residency, state = made.scheduler.residency, made.scheduler._state
    for seq, model, tokens, slo_ms in (
        ("long", "m0", 60, 60_000),
        ("first", "m1", 4, 60_000),
        ("second", "m2", 4, 70_000),
    ):
        one, at = request(seq, (1, 2, 3), model, max_tokens=tokens, ignore_eos=True), (1 + 110 * (seq != "long")) * MS
        made.ask(replace(one, arrival=at, slo_ms=slo_ms), at=at)

    def look() -> None:
        for seq in ("first", "second"):
            sequence = state.sequences[seq]
            route = state.router.only(sequence.chain)
            assert route is not None
            seen[seq] = residency.in_the_way(sequence, state.router.lacking(route)) is not None

    made.at(120 * MS, look)
    finished(made)
    assert seen == {"first": True, "second": False}
