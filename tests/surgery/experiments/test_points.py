"""Which layers come from which model, as in the paper's examples."""

from __future__ import annotations

import pytest

from surgery.experiments.points import sharing_points, switching_points, usual_counts, usual_intervals, whole
from zoo.errors import InputError


def layers_of(points):
    return {(point.line, point.size, point.at): point.mixture.layers for point in points}


def test_four_shared_layers_at_every_position_of_thirty_two():
    """Section 4.2: layers 0-3 of LLaMA and 4-31 of Vicuna, then 1-4 of LLaMA and 0, 5-31 of Vicuna, and so on."""
    found = layers_of(sharing_points(32, [4]))
    assert len(found) == 29
    assert found["shared", 4, 0] == "aaaa" + "b" * 28
    assert found["shared", 4, 1] == "b" + "aaaa" + "b" * 27
    assert found["shared", 4, 28] == "b" * 28 + "aaaa"


def test_two_layers_by_turns_behind_layer_sixteen():
    """Section 4.2: for x = 2, the next two layers are Vicuna's, two of LLaMA, two of Vicuna, and so on."""
    found = layers_of(switching_points(32, [16], [2]))
    assert found["switched", 16, 2] == "b" * 16 + "bbaa" * 4


def test_an_interval_that_reaches_the_end_is_the_second_model_alone():
    for start in range(8):
        last = usual_intervals(8, start)[-1]
        assert layers_of(switching_points(8, [start], [last]))["switched", start, last] == "b" * 8
    assert layers_of(switching_points(8, [6], [1]))["switched", 6, 1] == "bbbbbbba"


def test_pruned_lines_use_the_stand_ins_that_there_are():
    found = layers_of(sharing_points(4, [1, 2], "bssb"))
    assert {key: value for key, value in found.items() if key[0] == "pruned"} == {
        ("pruned", 1, 1): "bsbb",
        ("pruned", 1, 2): "bbsb",
        ("pruned", 2, 1): "bssb",
    }
    assert layers_of(switching_points(4, [0], [1], "bssb"))["pruned", 0, 1] == "bsbb"


def test_usual_numbers_and_whole_models():
    assert usual_counts(32) == [1, 2, 4, 8, 16]
    assert usual_intervals(8, 4) == [1, 2, 3, 4]
    assert usual_intervals(32, 16) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert (whole(3, "a").code, whole(3, "b").code) == ("a:aaa", "b:bbb")


@pytest.mark.parametrize("counts", [[0], [5], [-1]])
def test_counts_that_the_models_do_not_have_are_refused(counts):
    with pytest.raises(InputError, match="4"):
        sharing_points(4, counts)


def test_starts_and_intervals_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="behind layer 4"):
        switching_points(4, [4], [1])
    with pytest.raises(InputError, match="one or more"):
        switching_points(4, [2], [0])
