"""Plot an experiment's document: Figures 10 and 11 of BlockLLM for two stored models.

One column per measure, one row per line of the document (blocks of the other model, pruned blocks), one curve per
number of layers. Colours are those of Okabe and Ito, which colour-blind readers can distinguish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_MARKS = ("o", "s", "^", "D", "v", "P")
_INK, _GREY = "#222222", "#777777"
_MEASURES = {"accuracy": "next-token accuracy", "lines": "next line found among four", "loss": "loss, nats per token"}
_WORDS = {"shared": "layers of {a}", "switched": "alternating with {a}", "pruned": "pruned layers"}


def plot_experiment(document: Mapping[str, Any], path: Path) -> None:
    """Write the plot of an experiment's document as PNG."""
    lines = list(dict.fromkeys(point["line"] for point in document["points"]))
    measures = [measure for measure in _MEASURES if measure in document["baselines"]["b"]]
    figure = _figure(4.6 * len(measures), 1.1 + 3.5 * len(lines))
    grid = figure.subplots(len(lines), len(measures), squeeze=False, sharex=True)
    for row, line in zip(grid, lines, strict=True):
        for axes, measure in zip(row, measures, strict=True):
            _draw(axes, document, line, measure)
        row[0].set_title(
            _WORDS[line].format(a=document["a"]) + f" in {document['b']}", loc="left", fontsize=10.5, color=_INK
        )
    for axes in grid[-1]:
        axes.set_xlabel(_across(document), fontsize=9.5, color=_INK)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=6,
        frameon=False,
        fontsize=9,
        alignment="left",
        title_fontsize=8.5,
        title=f"bars: one standard error of the difference to {document['b']} alone, which was asked the same",
    )
    figure.suptitle(_title(document), x=0.01, ha="left", fontsize=12.5, fontweight="bold", color=_INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _title(document: Mapping[str, Any]) -> str:
    verb = "Sharing layers" if document["experiment"] == "sharing" else "Switching between models"
    probe = document["probe"]
    return f"{verb}: {document['a']} and {document['b']}, {probe['tokens']:,} tokens of {probe['source']}"


def _across(document: Mapping[str, Any]) -> str:
    return "first exchanged layer" if document["experiment"] == "sharing" else "layers between switches"


def _draw(axes: Axes, document: Mapping[str, Any], line: str, measure: str) -> None:
    from matplotlib.ticker import MaxNLocator

    points = [point for point in document["points"] if point["line"] == line]
    for index, size in enumerate(dict.fromkeys(point["size"] for point in points)):
        own = [point for point in points if point["size"] == size]
        axes.errorbar(
            [point["at"] for point in own],
            [point[measure]["value"] for point in own],
            yerr=_errors(own, measure),
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKS[index % len(_MARKS)],
            markersize=5,
            linewidth=1.6,
            capsize=2.5,
            elinewidth=1.0,
            label=_label(document, size),
        )
    for letter, style in (("b", "-"), ("a", ":")):
        value = document["baselines"][letter][measure]["value"]
        axes.axhline(value, color=_GREY, linestyle=style, linewidth=1.1, label=f"{document[letter]} alone", zorder=0)
    axes.set_ylabel(_MEASURES[measure], fontsize=9.5, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5)


def _errors(points: Sequence[Mapping[str, Any]], measure: str) -> list[float]:
    """Return one standard error of the difference to model b.

    All mixtures are measured on the same text, so what they have in common does not add to the error.
    """
    return [point[measure]["difference_error"] or 0.0 for point in points]


def _label(document: Mapping[str, Any], size: int) -> str:
    if document["experiment"] == "sharing":
        return f"{size} layer{'s' * (size != 1)}"
    return f"from layer {size} on"


def _figure(width: float, height: float) -> Figure:
    """Return a figure that needs neither a display nor matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
