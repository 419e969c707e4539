"""Strict orders over models that do not fit together."""

from __future__ import annotations

from dataclasses import replace

from tests.runtime.scheduler.order.test_planning import finished, swapping
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request


def test_a_strict_order_lets_an_earlier_request_run_on_a_model_that_is_to_leave() -> None:
    """What the model is to leave for would wait behind that request, and both for ever."""
    made = swapping("edf", strict=True)
    made.loading = lambda: 10 * MS
    asked = (("m0", 60, 60_000, 1), ("m1", 4, 60_000, 15), ("m0", 4, 5_000, 55))
    for number, (model, tokens, slo_ms, at) in enumerate(asked):
        one = request(f"s{number}", (1, 2, 3), model, max_tokens=tokens, ignore_eos=True)
        made.ask(replace(one, arrival=at * MS, slo_ms=slo_ms), at=at * MS)
    finished(made)
    closed, ends = made.trace.named("stage.close"), {event.seq: event.t for event in made.trace.named("finish")}
    assert 15 * MS < closed[0].t < 55 * MS
    assert ends["s2"] < ends["s0"] < ends["s1"]
