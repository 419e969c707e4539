"""Stop strings: the result does not depend on how the text is cut, and no character too many is given out."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.frontend.stop_strings import StopStrings

LETTERS = st.text(st.sampled_from("abc"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), max_size=4)


def truncated(text: str, stops: list[str]) -> str:
    """Compute the expected text character by character.

    The first character that completes a stop string ends the text before the longest stop string that ends there.
    """
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


def run(parts: list[str], stops: list[str]) -> list[str]:
    watch = StopStrings(stops)
    given = []
    for part in parts:
        given.append(watch.push(part))
        if watch.stopped:
            return given
    return [*given, watch.finish()]


@settings(max_examples=500, deadline=None)
@given(text=LETTERS, stops=STOPS, data=st.data())
def test_any_cut_gives_the_same_text(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert "".join(run(parts, stops)) == truncated(text, stops)


def test_a_partial_match_is_held_and_then_released() -> None:
    watch = StopStrings(["END"])
    assert watch.push("a E") == "a "
    assert watch.push("N") == ""
    assert watch.push("T") == "ENT"
    assert not watch.stopped
    assert watch.push("END") == "" and watch.stopped


def test_a_match_within_the_first_tokens_does_not_count_but_one_across_does() -> None:
    watch = StopStrings(["aa"])
    assert watch.push("aa", counts=False) == "a"
    assert not watch.stopped
    assert watch.push("b") == "ab" and not watch.stopped
    watch = StopStrings(["abc", "b"])
    assert watch.push("ab", counts=False) == ""
    assert watch.push("x") == "abx" and not watch.stopped


def test_without_stops_nothing_is_held() -> None:
    watch = StopStrings([])
    assert watch.push("anything") == "anything"
    assert watch.finish() == ""
