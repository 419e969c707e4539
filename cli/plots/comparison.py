"""Plot a comparison: heatmaps of all parts of one model against all parts of the other, and the pairs by depth.

The colour map is cividis, which is suitable for colour-blind readers; all heatmaps have the same scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from surgery.scoring.comparison import Comparison, ScoreMatrix
    from surgery.scoring.runs import ScoredUnit, Span

_INK = "#222222"
_LINES = {"similarity": ("#0072B2", "o"), "same token": ("#009E73", "s"), "control": ("#D55E00", "^")}
#: Above so many rows or columns cells have no values; above so many positions not every one is labelled.
_WRITTEN = 16
_TICKS = 20


def draw(found: Comparison, path: Path) -> None:
    """Write the plot. Raises InputError if the file cannot be written or the comparison has no matrix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if found.matrix is None:
        raise InputError("a heatmap needs the scores of all parts against all parts")
    tables = {"similarity": found.matrix.values, "control: B with random weights": found.matrix.control}
    known = {title: table for title, table in tables.items() if table is not None}
    figure = Figure(figsize=(2.6 + 4.4 * len(known) + 4.4, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(known) + 1, width_ratios=[1] * len(known) + [0.95])
    for at, (title, table) in enumerate(known.items()):
        image = _map(axes[at], found, found.matrix, table, title, named=at == 0)
    figure.colorbar(
        image, ax=list(axes[: len(known)]), shrink=0.8, pad=0.02, label="cosine of vocabulary distributions"
    )
    _profile(axes[-1], found)
    figure.suptitle(f"A  {found.a}      B  {found.b}\n", x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    frames = (
        "frames are the pairs"
        if found.granularity != "group"
        else "frames are the pairs, a group's score its last cell"
    )
    figure.supxlabel(
        f"{found.probe.tokens:,} tokens of {found.probe.source}; each part read by its model's own final norm and "
        f"head; {frames}",
        fontsize=9,
        color=_INK,
        x=0.01,
        ha="left",
    )
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def _map(
    axes: Axes, found: Comparison, matrix: ScoreMatrix, table: Sequence[Sequence[float]], title: str, named: bool
) -> Any:
    image = axes.imshow(
        table, cmap="cividis", vmin=0.0, vmax=1.0, aspect="equal" if len(table) == len(table[0]) else "auto"
    )
    axes.set_title(title, fontsize=11, color=_INK)
    part = "component" if found.granularity == "component" else "layer"
    axes.set_xlabel(f"{part} of B", fontsize=10)
    if named:
        axes.set_ylabel(f"{part} of A", fontsize=10)
    _ticks(axes.xaxis, matrix.b, part)
    _ticks(axes.yaxis, matrix.a, part)
    if max(len(table), len(table[0])) <= _WRITTEN:
        _values(axes, table)
    _frames(axes, found, matrix)
    return image


def _ticks(axis: Any, units: Sequence[ScoredUnit], part: str) -> None:
    step = -(-len(units) // _TICKS)
    spans = [unit.components if part == "component" else unit.layers for unit in units]
    axis.set_ticks(range(0, len(units), step), [str(span.lo) for span in spans[::step]], fontsize=9)


def _values(axes: Axes, table: Sequence[Sequence[float]]) -> None:
    size = 10 - max(len(table), len(table[0])) // 4
    for row, values in enumerate(table):
        for column, value in enumerate(values):
            text = "1.0" if value > 0.9995 else f"{value:.2f}".removeprefix("0") if len(table) > 8 else f"{value:.3f}"
            axes.text(
                column, row, text, ha="center", va="center", fontsize=size, color="white" if value < 0.55 else "black"
            )


def _frames(axes: Axes, found: Comparison, matrix: ScoreMatrix) -> None:
    """Draw a frame around the cells of each pair."""
    from matplotlib.patches import Rectangle

    starts_a = {unit.components.lo: at for at, unit in enumerate(matrix.a)}
    starts_b = {unit.components.lo: at for at, unit in enumerate(matrix.b)}
    ends_a = {unit.components.hi: at for at, unit in enumerate(matrix.a)}
    ends_b = {unit.components.hi: at for at, unit in enumerate(matrix.b)}
    for pair in found.pairs:
        row, column = starts_a[pair.a.components.lo], starts_b[pair.b.components.lo]
        height, width = ends_a[pair.a.components.hi] - row + 1, ends_b[pair.b.components.hi] - column + 1
        axes.add_patch(
            Rectangle(
                (column - 0.5, row - 0.5), width, height, fill=False, edgecolor="#D55E00", linewidth=1.6, clip_on=False
            )
        )


def _profile(axes: Axes, found: Comparison) -> None:
    """Plot similarity, share of equal tokens and control of the pairs by depth."""
    values = {
        "similarity": [pair.similarity for pair in found.pairs],
        "same token": [pair.metrics["agreement"] for pair in found.pairs],
        "control": [pair.control for pair in found.pairs if pair.control is not None],
    }
    for name, line in values.items():
        if line:
            colour, marker = _LINES[name]
            axes.plot(range(len(line)), line, color=colour, marker=marker, linewidth=2, markersize=5, label=name)
    axes.set_ylim(-0.03, 1.04)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("the pairs, by depth", fontsize=11, color=_INK)
    by_component = found.granularity == "component"
    spans = [pair.a.components if by_component else pair.a.layers for pair in found.pairs]
    axes.set_xlabel(
        "component of A" if by_component else "layers of A" if found.granularity == "group" else "layer of A",
        fontsize=10,
    )
    step = -(-len(spans) // _TICKS)
    axes.set_xticks(range(0, len(spans), step), [_shown(span) for span in spans[::step]], fontsize=9)
    axes.set_xlim(-0.5, len(spans) - 0.5)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(0.02, 0.3))


def _shown(span: Span) -> str:
    """Return `3`, or `3-5` for [3, 6)."""
    return str(span.lo) if span.hi == span.lo + 1 else f"{span.lo}-{span.hi - 1}"
