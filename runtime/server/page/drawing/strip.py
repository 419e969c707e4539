"""Draw a model's chain as a strip of components, coloured by the models that share them. Pure functions.

Components with the same set of users have one colour: the model's own, then one colour per set, as they appear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from runtime.server.page.drawing.svg import element, picture
from zoo.manifest import Placed

#: Colours of the style sheet for sets of users; sets beyond them share the last.
COLOURS = 8
#: Pixels of a cell, and between two.
_WIDTH, _HEIGHT, _GAP = 20, 26, 2
#: Rows of a layer's components.
_ROWS = {"attention": (0, 1), "ffn": (1, 1)}


@dataclass(frozen=True, slots=True)
class StripPart:
    """A component at its position in a model.

    Fields:
        users: Names of all models with this component, sorted; the model itself among them.
        nbytes: Bytes of its distinct tensors.
        colour: 0: the model's own; from 1: number of its set of users.
    """

    position: int
    placed: Placed
    users: tuple[str, ...]
    nbytes: int
    colour: int

    @property
    def title(self) -> str:
        component = self.placed.component
        where = "" if self.placed.layer is None else f" of layer {self.placed.layer}"
        adapter = "" if component.adapter is None else f" with {component.adapter.kind}"
        shared = "its own" if len(self.users) == 1 else f"in {len(self.users)} models"
        return f"{component.kind}{where}{adapter}, {shared}, {component.digest}"


def coloured(users: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the colour of each component, by the models that use it."""
    numbers: dict[tuple[str, ...], int] = {}
    return [0 if len(each) <= 1 else min(numbers.setdefault(each, len(numbers) + 1), COLOURS) for each in users]


def strip_svg(parts: Sequence[StripPart], label: str, linked: bool = True) -> Markup:
    """Return the drawing: a column per layer, attention above FFN; `linked`: each cell to its row in the table."""
    cells = list(_cells(parts))
    columns = 1 + max((column for column, _ in cells), default=0)
    drawn = [_drawn(part, column, place, linked) for part, (column, place) in zip(parts, cells, strict=True)]
    return picture(columns * (_WIDTH + _GAP), 2 * (_HEIGHT + _GAP), label, drawn, "strip")


def _cells(parts: Sequence[StripPart]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (column, (row, rows)). Attention and FFN of one layer stand in one column, anything else in its own."""
    column, layer, taken = -1, None, set[int]()
    for part in parts:
        place = _ROWS.get(part.placed.component.kind, (0, 2))
        here = part.placed.layer
        if here is None or here != layer or place[1] == 2 or place[0] in taken:
            column, taken = column + 1, set()
        layer = here
        taken |= set(range(place[0], place[0] + place[1]))
        yield column, place


def _drawn(part: StripPart, column: int, place: tuple[int, int], linked: bool) -> Markup:
    row, rows = place
    cell = element(
        "rect",
        element("title", part.title),
        x=column * (_WIDTH + _GAP),
        y=row * (_HEIGHT + _GAP),
        width=_WIDTH,
        height=rows * _HEIGHT + (rows - 1) * _GAP,
        rx=3,
        class_=f"part share-{part.colour}",
    )
    mark = "" if part.placed.component.adapter is None else _mark(column, row)
    return element("a", cell, mark, href=f"#part-{part.position}") if linked else element("g", cell, mark)


def _mark(column: int, row: int) -> Markup:
    """Return the dot of a component with an adapter."""
    x, y = column * (_WIDTH + _GAP) + _WIDTH / 2, row * (_HEIGHT + _GAP) + _HEIGHT / 2
    return element("circle", cx=x, cy=y, r=3, class_="adapter")
