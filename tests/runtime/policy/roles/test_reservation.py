"""Reservation rules against the growth itself, token by token (TI-20 to TI-22)."""

from __future__ import annotations

import random

import pytest

from runtime.policy.roles.reservation import Growth, lasts, peak


def most_taken(sequences: list[Growth]) -> float:
    """Return the most pages taken at any token; a sequence has its last pages while its last token is made."""
    last = max(each.left for each in sequences)
    return max(sum(each.after(at) for each in sequences if each.left >= at) for at in range(1, last + 1))


def drawn(draw: random.Random) -> list[Growth]:
    steps = (0.25, 0.5, 1.0, 2.0)
    return [
        Growth(draw.randrange(40) / 2, draw.randrange(1, 40), draw.choice(steps)) for _ in range(draw.randrange(1, 9))
    ]


def test_the_peak_equals_brute_force() -> None:
    draw = random.Random(1)
    for _ in range(10_000):
        sequences = drawn(draw)
        assert peak(sequences) == pytest.approx(most_taken(sequences))


def test_each_rule_equals_its_definition() -> None:
    draw = random.Random(2)
    verdicts = set()
    for _ in range(3_000):
        *running, new = drawn(draw)
        capacity = draw.randrange(1, 120)
        have = sum(each.have for each in running)
        first = min((each.left for each in running), default=new.left)
        expected = {
            "greedy": True,
            "static": have + new.after(new.left) <= capacity,
            "dynamic": sum(each.after(first) for each in running) + new.after(min(first, new.left)) <= capacity,
            "peak": most_taken([*running, new]) <= capacity,
        }
        found = {rule: lasts(rule, capacity, running, new) for rule in ("greedy", "static", "dynamic", "peak")}
        assert found == expected
        verdicts.add(tuple(found.values()))
    assert len(verdicts) > 4  # the rules differ


def test_a_first_end_that_frees_too_little_is_what_only_the_peak_sees() -> None:
    """The paper's dynamic rule looks at the first end alone: then two long answers need more than there is."""
    running = [Growth(10, 2, 1.0), Growth(10, 100, 1.0)]
    new = Growth(10, 100, 1.0)
    assert lasts("dynamic", 100, running, new) and not lasts("peak", 100, running, new)
