"""Buckets, their sums, and the accuracy of predictions beside that of the most frequent bucket (TI-10)."""

from __future__ import annotations

import pytest

from surrogates.lengths.buckets import after, coarser, edges_of, granularities_of, score, survived
from surrogates.lengths.prompts import TEMPLATES, cuts, questions
from surrogates.lengths.storing import batches
from zoo.errors import InputError


def test_granularities_are_given_or_shares_of_the_longest_answer() -> None:
    assert granularities_of((), 320) == (20, 40, 80)
    assert granularities_of((400, 100, 200), 2048) == (100, 200, 400)
    assert granularities_of((), 5) == (1, 2, 4)
    assert granularities_of((), 4) == (1, 2)
    for wrong in ((0,), (320,), (30, 40)):
        with pytest.raises(InputError, match="granularit"):
            granularities_of(wrong, 320)


def test_the_last_bucket_has_the_answers_that_were_cut_off() -> None:
    assert edges_of(20, 60) == (0, 20, 40, 60)
    assert edges_of(25, 60) == (0, 25, 50)


def test_wider_buckets_are_sums() -> None:
    assert coarser([0.125, 0.25, 0.5, 0.125, 0.0], 2) == [0.375, 0.625, 0.0]


def test_scores_by_hand() -> None:
    masses = [[0.9, 0.1, 0.0], [0.4, 0.35, 0.25], [0.0, 0.3, 0.7], [0.6, 0.4, 0.0]]
    lengths, trained = [5, 12, 25, 15], [1, 2, 12, 13, 14]
    narrow = score(masses, lengths, trained, 10, 10)
    assert narrow.confusion == ((1, 0, 0), (2, 0, 0), (0, 0, 1))
    assert narrow.accuracy == 0.5 and narrow.majority == 0.5  # bucket 1 is most frequent in the training: 12 and 15
    wide = score(masses, lengths, trained, 10, 20)
    assert wide.confusion == ((3, 0), (0, 1)) and wide.accuracy == 1.0 and wide.majority == 0.75


def test_prompts_are_different_and_the_same_everywhere() -> None:
    asked = questions(500, seed=3)
    assert len(asked) == len(set(asked)) == 500 and asked == questions(500, seed=3) != questions(500, seed=4)
    assert questions(2, seed=0)[0].startswith(TEMPLATES[0].split("{")[0])
    text = " ".join(f"word{at}" for at in range(5000))
    pieces = cuts(text, 100)
    assert len(set(pieces)) == 100 and all(piece in text and len(piece) <= 400 for piece in pieces)
    assert all(text[text.index(piece) - 1 :].startswith(" ") or text.startswith(piece) for piece in pieces)
    assert cuts("too short", 10) == []


def test_prompts_of_similar_length_run_together_and_long_ones_alone() -> None:
    lengths = [600, 5, 512, 7, 513, *[6] * 20]
    found = batches(lengths)
    assert sorted(at for some in found for at in some) == list(range(25))
    assert [len(some) for some in found] == [16, 7, 1, 1]
    assert [at for some in found if len(some) == 1 for at in some] == [4, 0]


def test_what_is_still_to_come_is_added_to_what_there_is() -> None:
    assert after((0, 20, 40), (0.5, 0.3, 0.2), 64) == ((0, 65, 84, 104), (0.0, 0.5, 0.3, 0.2))
    assert after((0, 1, 2), (0.5, 0.3, 0.2), 7) == ((0, 8, 9), (0.0, 0.3, 0.2)), "none ends without another token"


def test_what_survives_is_what_is_longer() -> None:
    edges, mass = (0, 20, 40, 60), (0.4, 0.3, 0.2, 0.1)
    assert survived(edges, mass, 0, edges) == pytest.approx(mass)
    assert survived(edges, mass, 39, edges) == pytest.approx([0, 0, 2 / 3, 1 / 3])
    assert survived(edges, mass, 29, edges) == pytest.approx([0, 0.15 / 0.45, 0.2 / 0.45, 0.1 / 0.45])
    assert survived(edges, (1.0, 0.0, 0.0, 0.0), 30, edges) == [0, 1, 0, 0], "it outlives its forecast"
    wider = survived(*after(edges, (0.5, 0.25, 0.15, 0.1), 31), 31, edges)
    assert wider == pytest.approx([0, 0.5 * 8 / 19, 0.5 * 11 / 19 + 0.25 * 9 / 20, 1 - 0.5 - 0.25 * 9 / 20])
    assert sum(wider) == pytest.approx(1.0)
