"""Plot the latencies of a benchmark's document as cumulative shares of the requests, one curve per target.

Colours are those of Okabe and Ito, which colour-blind readers can distinguish; targets also differ in line style.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOOKS = (("#0072B2", "-"), ("#D55E00", "--"))
_INK, _GREY = "#222222", "#777777"
_MEASURES = {"ttft": "time to first token", "tpot": "time per further token", "e2e": "time to last token"}


def plot_bench(document: Mapping[str, Any], path: Path) -> None:
    """Write the plot as PNG. Raises InputError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.6, 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    row = figure.subplots(1, len(_MEASURES), sharey=True)
    for axes, measure in zip(row, _MEASURES, strict=True):
        _draw(axes, document, measure)
    row[0].set_ylabel("share of requests", fontsize=9.5, color=_INK)
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(_title(document), x=0.01, ha="left", fontsize=12.5, fontweight="bold", color=_INK)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def _title(document: Mapping[str, Any]) -> str:
    work = document["workload"]
    if work["clients"] is not None:
        load = f"{work['clients']} clients"
    elif (
        document["trace"] is not None and work["arrivals"]["rate"] is None and document["trace"]["format"] != "sharegpt"
    ):
        load = f"trace {document['trace']['file']} at {work['speed']:g} x"
    else:
        rate = work["arrivals"]["rate"]
        load = "all at once" if rate is None else f"{work['arrivals']['kind'].capitalize()} arrivals, {rate:g} a second"
    models = len(document["targets"][0]["models"])
    rounds = f" ({document['rounds']} rounds)" * (document["rounds"] > 1)
    return (
        f"{document['runs'][0]['requests']:,} requests to {models} model{'s' * (models != 1)}, "
        f"{work['popularity']}; {load}{rounds}"
    )


def _draw(axes: Axes, document: Mapping[str, Any], measure: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for index, target in enumerate(document["targets"]):
        colour, stroke = _LOOKS[index % len(_LOOKS)]
        values = sorted(
            answer[measure] * 1000
            for run in document["runs"]
            if run["target"] == index
            for answer in run["answers"]
            if answer["error"] is None and answer[measure] is not None
        )
        shares = [(rank + 1) / len(values) for rank in range(len(values))]
        label = f"{target['name']}: {target['typical']['tokens_per_second']:,.0f} tokens/s"
        axes.plot(values, shares, color=colour, linestyle=stroke, linewidth=1.8, drawstyle="steps-post", label=label)
    bound = document["slo_seconds"][measure]
    if bound is not None:
        axes.axvline(bound * 1000, color=_GREY, linestyle=":", linewidth=1.2)
        axes.annotate("bound", (bound * 1000, 0.02), xytext=(3, 0), textcoords="offset points", fontsize=8, color=_GREY)
    for share, name in ((0.5, "median"), (0.95, "p95")):
        axes.axhline(share, color="#E5E5E5", linewidth=0.9, zorder=0)
        axes.annotate(name, (0.01, share), xycoords=("axes fraction", "data"), va="bottom", fontsize=7.5, color=_GREY)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel(f"{_MEASURES[measure]}, ms", fontsize=9.5, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5)
