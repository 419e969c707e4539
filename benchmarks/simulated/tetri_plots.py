"""Draw the curves of `benchmarks.simulated.tetri_figures`, with the numbers of TetriInfer's text beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cli.simulate.plot import LOOKS, dress, figure_of, save

_GREY = "#777777"


@dataclass(frozen=True, slots=True)
class CurvePanel:
    """A curve with what the paper's text says of it.

    Fields:
        points: Values by place on the axis.
        level: A value that the text gives without its place.
        place: A place on the axis, such as the knee.
        of_first: Whether points are shares of each curve's own first value.
    """

    curve: str
    title: str
    axis: str
    points: Mapping[float, float]
    level: float | None = None
    place: float | None = None
    of_first: bool = False


_PANELS = (
    CurvePanel("2: prompt tokens/s", "2: tokens per second of a prompt", "tokens of it", {}, place=512),
    CurvePanel("2: decoded tokens/s", "2: tokens per second of decodes", "rows", {}),
    CurvePanel("3a: light prompt beside light ones", "3a: a light prompt", "light prompts beside", {7: 2.0, 63: 8.0}),
    CurvePanel("3b: light prompt beside heavy ones", "3b: a light prompt", "heavy prompts beside", {}, level=10.0),
    CurvePanel("3c: heavy prompt beside light ones", "3c: a heavy prompt", "light prompts beside", {}, level=3.0),
    CurvePanel("4b: decode beside heavy prompts", "4b: a decode", "heavy prompts beside", {1: 5.0}),
    CurvePanel("4c: light prompt beside decodes", "4c: a light prompt", "decodes beside", {}, level=2.5),
    CurvePanel(
        "5: tokens/s", "5: tokens per second of 128 decodes", "share of heavy ones", {0.5: 0.84}, of_first=True
    ),
)  # fmt: skip


def draw(curves: Mapping[str, Mapping[str, Mapping[float, float]]], picture: Path) -> Path:
    """Write a PNG of eight panels with a line per cost. Raises InputError if it cannot be written."""
    figure = figure_of(15.6, 7.4, "OPT-13B on two V100: interference in one step, over the request alone (TetriInfer)")
    for axes, panel in zip(figure.subplots(2, 4).flat, _PANELS, strict=True):
        for (name, found), (colour, stroke, marker) in zip(curves.items(), LOOKS, strict=False):
            curve = found[panel.curve]
            axes.plot(
                list(curve), list(curve.values()), color=colour, linestyle=stroke, marker=marker, linewidth=1.8,
                label=name,
            )  # fmt: skip
            for at, value in panel.points.items():
                height = value * next(iter(curve.values())) if panel.of_first else value
                axes.plot([at], [height], color=colour if panel.of_first else _GREY, marker="D", markersize=8.0)
        if panel.level is not None:
            axes.axhline(panel.level, color=_GREY, linestyle=":", linewidth=1.4)
        if panel.place is not None:
            axes.axvline(panel.place, color=_GREY, linestyle=":", linewidth=1.4)
        if max(next(iter(curves.values()))[panel.curve]) > 10:
            axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0.0)
        dress(axes, panel.axis, "", panel.title)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9.5)
    return save(figure, picture)
