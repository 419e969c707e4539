"""What decode admission, the choice of a decode device and changes of roles gain, in small (TI-14, TI-22, TI-24)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.simulated.tetri_decode import KNOWLEDGE, LONG, DecodeRun, decoded
from benchmarks.simulated.tetri_flips import SETTINGS, shifted


def run(rule: str, known: str) -> DecodeRun:
    lengths: Mapping[str, Any] = {**KNOWLEDGE[known], "seed": 1}
    return decoded(0, 200, 8.0, 1, LONG, decode={"admission": rule}, lengths=lengths)


def test_peak_reservation_preempts_least() -> None:
    """Must not preempt where lengths are known, and less than the paper's rules where they are predicted."""
    assert run("peak", "exact").preemptions == 0
    peak, static, dynamic, greedy = (run(rule, "predicted") for rule in ("peak", "static", "dynamic", "greedy"))
    assert peak.preemptions < min(static.preemptions, dynamic.preemptions)
    assert static.preemptions < greedy.preemptions and peak.mean < greedy.mean


def test_two_choices_are_no_worse_than_one_and_any_is_better_than_the_worst() -> None:
    def mean(choice: str) -> float:
        lengths = {**KNOWLEDGE["predicted"], "seed": 0}
        return decoded(4, 128, 0.0, 0, decode={"choice": choice}, lengths=lengths).mean

    po2, random, worst = mean("po2"), mean("random"), mean("worst")
    assert po2 <= random * 1.01 and random * 1.2 < worst


def test_roles_that_follow_the_load_suit_both_loads() -> None:
    fixed, spare = (shifted(SETTINGS[name], 4.0, 2, 0) for name in ("2 prefill, 1 decode", "spare"))
    assert spare.changes == 1 and fixed.changes == 0
    assert spare.mean_answers < 0.8 * fixed.mean_answers
    assert spare.mean_long == pytest.approx(fixed.mean_long, rel=0.05)
