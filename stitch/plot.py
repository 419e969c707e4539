"""Plot a stitch over its places (as Figure 13 of BlockLLM): similarity to B at the head, and the chain's own accuracy.

Reads the document alone. Colours are Okabe and Ito's; hollow marks are places that were never trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#222222"
_LINES = (
    ("similarity", "the stitch", "#0072B2", "-", "o"),
    ("without_position", "trained without the position", "#D55E00", "--", "s"),
    ("start", "least-squares start", "#009E73", ":", "^"),
    ("unstitched", "no stitch", "#999999", "-.", "v"),
)


def plot_stitch(document: Mapping[str, Any], path: Path) -> None:
    """Write the plot as a PNG."""
    figure = _figure(11.5, 4.9)
    left, right = figure.subplots(1, 2)
    _similarity(left, document)
    _accuracy(right, document)
    for axes in (left, right):
        _places(axes, document["points"])
    width_a, width_b = document["dims"]
    title = (
        f"One stitch from {document['a']} (width {width_a}) to {document['b']} (width {width_b}), at "
        f"{len(document['points'])} places"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    _save(figure, path)


def _similarity(axes: Axes, document: Mapping[str, Any]) -> None:
    points = document["points"]
    for key, label, colour, style, marker in _LINES:
        if key in points[0]:
            _line(axes, [point[key] for point in points], points, label, colour, style, marker)
    axes.set_title(f"Cosine at the head against {document['b']}", loc="left", fontsize=11, color=_INK)
    axes.set_ylabel("similarity, mean over held-out tokens")
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=9, loc="best")


def _accuracy(axes: Axes, document: Mapping[str, Any]) -> None:
    points = document["points"]
    _line(axes, [100 * point["accuracy"] for point in points], points, "stitched chain", _LINES[0][2], "-", "o")
    for key, colour, style in (("a", "#E69F00", "--"), ("b", "#CC79A7", "-.")):
        level = 100 * document["parents"][key]["accuracy"]
        axes.axhline(level, color=colour, linestyle=style, linewidth=1.6, label=f"{document[key]} alone")
    axes.set_title("Next-token accuracy on held-out text", loc="left", fontsize=11, color=_INK)
    axes.set_ylabel("% of tokens")
    axes.margins(y=0.25)
    axes.legend(frameon=False, fontsize=9, loc="best")


def _line(
    axes: Axes,
    values: Sequence[float],
    points: Sequence[Mapping[str, Any]],
    label: str,
    colour: str,
    style: str,
    marker: str,
) -> None:
    axes.plot(range(len(values)), values, style, color=colour, linewidth=1.6, label=label)
    for at, (value, point) in enumerate(zip(values, points, strict=True)):
        axes.plot(at, value, marker, color=colour, markerfacecolor=colour if point["seen"] else "white", markersize=6)


def _places(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    axes.set_xticks(range(len(points)), [f"{point['a_layer']}:{point['b_layer']}" for point in points])
    axes.set_xlabel("stitch behind layer : before layer (hollow: never trained)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)


@dataclass(frozen=True, slots=True)
class Over:
    """The horizontal axis of `plot_curve`: its value for a document, and its texts."""

    value: Callable[[Mapping[str, Any]], float]
    label: str
    title: str
    logarithmic: bool = False


SIZE = Over(
    lambda document: float(document["parents"]["b"]["params"]) / 1e6,
    "million weights of the model that the stitch leads to",
    "Stitches by the size of their models",
    logarithmic=True,
)
LIKENESS = Over(
    lambda document: float(document["parents"]["a"]["similarity"]),
    "cosine at the head of the two models by themselves",
    "Stitches by the likeness of the models they join",
)


def plot_curve(documents: Sequence[Mapping[str, Any]], path: Path, over: Over = SIZE) -> None:
    """Plot the similarity of several stitches against the size of the model they lead to, or another property.

    The size is `parents.b.params` of the document.
    """
    figure = _figure(7.5, 4.8)
    axes = figure.subplots()
    ordered = sorted(documents, key=over.value)
    at = [over.value(document) for document in ordered]
    for part, label, colour, marker in (
        ("similarity_seen", "trained places", "#0072B2", "o"),
        ("similarity_unseen", "places never trained", "#56B4E9", "D"),
    ):
        known = [(x, document[part]) for x, document in zip(at, ordered, strict=True) if document[part] is not None]
        axes.plot([x for x, _ in known], [value for _, value in known], marker, color=colour, label=label, markersize=7)
    starts = [document["compared"]["start"]["similarity_mean"] for document in ordered]
    axes.plot(at, starts, "^", color="#009E73", label="least-squares start")
    for x, document in zip(at, ordered, strict=True):
        place, name = (x, document["similarity_seen"]), f"{document['a']} to {document['b']}"
        side, shift = ("right", -7) if x > (at[0] + at[-1]) / 2 else ("left", 7)
        axes.annotate(name, place, xytext=(shift, 5), textcoords="offset points", fontsize=8, ha=side)
    axes.set_xlabel(over.label)
    axes.set_ylabel("cosine at the head, mean over places")
    axes.set_title(over.title, loc="left", fontsize=12, fontweight="bold", color=_INK)
    axes.margins(x=0.3, y=0.2)
    if over.logarithmic:
        axes.set_xscale("log")
        axes.set_xticks(at, [f"{x:.3g}" for x in at])
        axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    """Return a figure drawn without a display and without matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
