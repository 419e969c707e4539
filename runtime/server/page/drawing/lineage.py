"""Draw which model was made from which, as a tree in SVG. Pure functions.

One line per model, below the model that it was made from and to the right of it, as files are listed below folders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from runtime.server.page.drawing.svg import element, picture, short
from runtime.server.page.links import model_link
from runtime.server.page.listing import by_name
from zoo.catalog import ModelEntry

#: Pixels: height of a line, width of a level, radius of a dot, width of a character.
_LINE, _LEVEL, _DOT, _CHARACTER = 22, 22, 5, 7.4
#: Levels that are drawn to the right; deeper ones stand at the last (checkpoints of one run may be hundreds deep).
DEEPEST = 12
_LABEL = 48


@dataclass(frozen=True, slots=True)
class TreeLine:
    """A model's place in the tree. `parent`: number of the line of the model that it was made from; None for roots."""

    model: ModelEntry
    level: int
    parent: int | None


def tree_of(models: Sequence[ModelEntry]) -> list[TreeLine]:
    """Return the lines from top to bottom: each model below its base, siblings by name.

    A model is a root if its base is not among the models.
    """
    names = {model.name for model in models}
    below: dict[str | None, list[ModelEntry]] = defaultdict(list)
    for model in sorted(models, key=lambda each: by_name(each.name)):
        below[model.base if model.base in names and model.base != model.name else None].append(model)
    lines: list[TreeLine] = []
    waiting: list[tuple[ModelEntry, int, int | None]] = [(root, 0, None) for root in reversed(below[None])]
    while waiting:
        model, level, parent = waiting.pop()
        waiting += [(child, level + 1, len(lines)) for child in reversed(below[model.name])]
        lines.append(TreeLine(model, level, parent))
    return lines


def lineage_svg(models: Sequence[ModelEntry]) -> Markup:
    """Return the drawing; each name is a link to the model's page."""
    lines = tree_of(models)
    drawn = [*_branches(lines), *(_node(number, line) for number, line in enumerate(lines))]
    deepest = max((_x(line) for line in lines), default=0)
    longest = max((len(_label(line)) for line in lines), default=0)
    return picture(
        deepest + 24 + longest * _CHARACTER, len(lines) * _LINE + 4.0, "Lineage of the models", drawn, "tree"
    )


def _branches(lines: Sequence[TreeLine]) -> Iterator[Markup]:
    for number, line in enumerate(lines):
        if line.parent is None:
            continue
        x, y, top = _x(line), _y(number), _y(line.parent) + _DOT
        left = min(_x(lines[line.parent]), x - _LEVEL / 2)
        yield element("path", d=f"M{left:g} {top:g}V{y:g}H{x - _DOT:g}", class_="branch")


def _node(number: int, line: TreeLine) -> Markup:
    model = line.model
    x, y = _x(line), _y(number)
    return element(
        "a",
        element("title", f"{model.name}: {model.kind}{f' of {model.base}' if model.base else ''}, {model.family}"),
        element("circle", cx=x, cy=y, r=_DOT, class_=f"kind kind-{model.kind}"),
        element("text", _label(line), x=x + 12, y=y + 4.5),
        href=model_link(model.name),
    )


def _label(line: TreeLine) -> str:
    return f"{short(line.model.name, _LABEL)} · {line.model.kind}"


def _x(line: TreeLine) -> float:
    return 10.0 + min(line.level, DEEPEST) * _LEVEL


def _y(number: int) -> float:
    return number * _LINE + _LINE / 2
