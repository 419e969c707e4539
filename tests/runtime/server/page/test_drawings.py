"""The drawings as pure functions: escaping, the order of a tree, cells of a strip."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from runtime.server.page.drawing.lineage import lineage_svg, tree_of
from runtime.server.page.drawing.strip import COLOURS, coloured
from runtime.server.page.drawing.svg import element, short
from tests.runtime.server.page.looking import HOSTILE, parsed
from zoo.catalog import ModelEntry


def entry(name: str, base: str | None = None) -> ModelEntry:
    return ModelEntry(name, "full" if base else "foundation", base, "llama", name, datetime(2026, 1, 1, tzinfo=UTC))


@given(st.text(), st.text())
def test_text_and_attributes_are_escaped(text: str, value: str) -> None:
    made = parsed(element("text", text, element("b", "in"), class_=value, x=1.50, y=None))
    (found,) = made.all("text")
    assert found.one("b").text == "in" and len(list(found)) == 1
    assert set(found.attributes) == {"class", "x"} and found.attributes["x"] == "1.5"
    # What an HTML reader itself changes is left out of the comparison: line ends, and the character 0.
    if not {"\r", "\0"} & {*text, *value}:
        assert found.attributes["class"] == value and found.raw == text + "in"


def test_markup_is_what_elements_make_and_nothing_else() -> None:
    assert element("g", HOSTILE) == Markup("<g>{}</g>").format(HOSTILE)
    assert element("g", element("circle", r=2)) == '<g><circle r="2"></circle></g>'


def test_a_tree_has_each_model_below_its_base() -> None:
    models = [entry("c", "b"), entry("b", "a"), entry("a"), entry("a2", "a"), entry("z", "gone"), entry("d", "c")]
    lines = tree_of(models)
    assert [(line.model.name, line.level, line.parent) for line in lines] == [
        ("a", 0, None), ("a2", 1, 0), ("b", 1, 0), ("c", 2, 2), ("d", 3, 3), ("z", 0, None)
    ]  # fmt: skip


def test_a_deep_tree_stays_narrow() -> None:
    chain = [entry("m0000"), *(entry(f"m{at:04}", f"m{at - 1:04}") for at in range(1, 3000))]
    drawing = parsed(lineage_svg(chain)).one("svg")
    assert len(drawing.all("a")) == 3000 and float(drawing.attributes["width"]) < 700


def test_colours_follow_the_sets_of_users() -> None:
    assert coloured([("a",), ("a", "b"), ("a", "c"), ("a", "b"), ()]) == [0, 1, 2, 1, 0]
    many = coloured([("a", str(at)) for at in range(COLOURS + 5)])
    assert many == [*range(1, COLOURS + 1), *[COLOURS] * 5]


@given(st.text(max_size=80), st.integers(2, 40))
def test_short_names_keep_their_ends(text: str, most: int) -> None:
    cut = short(text, most)
    assert len(cut) <= most and (cut == text or (cut[-1] == text[-1] and "…" in cut))
