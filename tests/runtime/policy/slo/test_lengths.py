"""Predicted lengths of answers: by class, conditional on what was made, never above the limit."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.slo.lengths import AnswerLengths, class_of

KEY = class_of("m", 100, 500)


def test_without_answers_the_limit_is_assumed() -> None:
    assert AnswerLengths().expected(KEY, 10, 500) == 490
    assert AnswerLengths().at_most(KEY, 10, 500) == 490


def test_the_mean_of_a_class_is_learned_and_other_classes_keep_theirs() -> None:
    lengths, rng = AnswerLengths(), random.Random(0)
    for _ in range(400):
        lengths.add(KEY, rng.choice((20, 100)))
    assert 55 <= lengths.expected(KEY, 0, 500) <= 66
    assert lengths.expected(class_of("n", 100, 500), 0, 500) == 500


def test_what_was_made_leaves_the_shorter_answers_out() -> None:
    lengths = AnswerLengths()
    for _ in range(200):
        lengths.add(KEY, 20)
        lengths.add(KEY, 100)
    assert lengths.expected(KEY, 30, 500) > 65, "an answer of 30 tokens is not one of 20"
    assert lengths.expected(KEY, 0, 500) < 65


def test_the_upper_bound_holds_for_its_share() -> None:
    lengths, rng = AnswerLengths(), random.Random(1)
    made = [min(500, int(rng.expovariate(1 / 80)) + 1) for _ in range(2000)]
    for length in made[:1000]:
        lengths.add(KEY, length)
    bound = lengths.at_most(KEY, 0, 500, 0.95)
    held = sum(length <= bound for length in made[1000:]) / 1000
    assert 0.92 <= held <= 0.98


def queue_of(lengths: list[int], places: int, steps: int, sampled: bool) -> AnswerLengths:
    """Run so many steps of answers of these lengths, a place each; return what is known of them then."""
    found, waiting, running = AnswerLengths(), list(enumerate(lengths)), dict[int, int]()
    found.add(KEY, 8)
    for _ in range(steps):
        while len(running) < places:
            running[waiting.pop(0)[0]] = 0
        for each in list(running):
            running[each] += 1
            if sampled:
                found.sample(KEY, f"s{each}", running[each])
            if running[each] == lengths[each]:
                found.add(KEY, running.pop(each), f"s{each}")
    return found


def test_running_answers_count_as_longer_than_what_they_have() -> None:
    """After 150 steps mostly short answers have ended: their mean is far below that of all that began."""
    biased, mended = [], []
    for seed in range(40):
        rng = random.Random(seed)
        lengths = [rng.choice((8, 8, 8, 100)) for _ in range(400)]
        biased.append(queue_of(lengths, 16, 150, False).expected(KEY, 0, 500))
        mended.append(queue_of(lengths, 16, 150, True).expected(KEY, 0, 500))
    assert sum(biased) / 40 < 0.85 * 31
    assert abs(sum(mended) / 40 / 31 - 1) < 0.08


def test_running_answers_end_or_are_dropped() -> None:
    lengths = AnswerLengths()
    for _ in range(50):
        lengths.add(KEY, 20)
    known = lengths.expected(KEY, 0, 500)
    lengths.sample(KEY, "a", 60)
    assert lengths.expected(KEY, 0, 500) > known + 1
    lengths.drop_running(KEY, "a")
    assert lengths.expected(KEY, 0, 500) == known
    lengths.sample(KEY, "a", 19)
    lengths.add(KEY, 20, "a")
    assert lengths.expected(KEY, 0, 500) == known, "it counts once"


def test_the_doubt_of_a_mean_falls_with_the_answers() -> None:
    few, many, rng = AnswerLengths(), AnswerLengths(), random.Random(2)
    assert few.doubt(KEY) == 1.0
    for count, lengths in ((20, few), (500, many)):
        for _ in range(count):
            lengths.add(KEY, rng.choice((8, 8, 8, 100)))
    assert few.doubt(KEY) > 3 * many.doubt(KEY) > 0.1


def test_newer_answers_count_more() -> None:
    lengths = AnswerLengths()
    for length, count in ((10, 2000), (200, 2000)):
        for _ in range(count):
            lengths.add(KEY, length)
    assert lengths.expected(KEY, 0, 500) > 180


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), max_size=30), st.integers(0, 1999), st.integers(1, 2000))
def test_predictions_stay_within_the_limit(added: list[int], made: int, more: int) -> None:
    lengths, most = AnswerLengths(), made + more
    for length in added:
        lengths.add(KEY, length)
    assert 1 <= lengths.expected(KEY, made, most) <= max(more, 1)
    assert 1 <= lengths.at_most(KEY, made, most) <= max(more, 1)


def test_an_answer_longer_than_all_so_far_is_expected_to_double() -> None:
    lengths = AnswerLengths()
    for _ in range(50):
        lengths.add(KEY, 20)
    assert lengths.expected(KEY, 60, 500) == lengths.at_most(KEY, 60, 500) == 60
    assert lengths.expected(KEY, 400, 500) == 100, "the limit holds"
