"""Plot a study: one run's latencies, load and memory by policy, and measures along an axis.

These are Figures 18 to 21, and Figure 22 and Table 2. Colours are those of Okabe and Ito, which colour-blind readers
can distinguish; policies also differ in line style.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colour, line style and marker of each policy, in order.
LOOKS = (
    ("#0072B2", "-", "o"),
    ("#D55E00", "--", "s"),
    ("#009E73", "-.", "^"),
    ("#CC79A7", ":", "D"),
    ("#E69F00", "-", "v"),
)
_INK, _GREY, _PALE = "#222222", "#777777", "#E5E5E5"
_ALONG = {
    "median latency, s": lambda policy: policy["latency"]["p50"],
    "p95 latency, s": lambda policy: policy["latency"]["p95"],
    "tokens a second": lambda policy: policy["throughput_tokens"],
    "share of time busy": lambda policy: policy["utilisation"],
}


def plot_study(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write PNGs into a folder and return their paths. Raises InputError if one cannot be written."""
    made = []
    for number, case in enumerate(document["cases"]):
        name = "run.png" if len(document["cases"]) == 1 else f"run-{number}.png"
        made.append(save(_run(document, case), folder / name))
    if document["axis"]:
        made.append(save(_along(document), folder / "along.png"))
    return made


def _run(document: Mapping[str, Any], case: Mapping[str, Any]) -> Figure:
    """Return four panels of one case: latencies, tokens per second, busy devices over time, memory."""
    figure = figure_of(12.6, 7.0, document["title"] + (f"; {case['label']}" if case["label"] else ""))
    (left, right), (below, memory) = figure.subplots(2, 2)
    _latencies(left, case["policies"])
    _bars(right, case["policies"], {"tokens a second": lambda policy: policy["throughput_tokens"]}, "throughput")
    _over_time(below, case["policies"])
    parts = {
        "weights, mean": lambda p: p["memory"]["weights_mean"] / 1e9,
        "K and V, most": lambda p: p["memory"]["kv_max"] / 1e9,
    }
    _bars(memory, case["policies"], parts, "memory of all devices, GB")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9.5)
    return figure


def _latencies(axes: Axes, policies: Mapping[str, Any]) -> None:
    for (name, policy), (colour, stroke, _) in zip(policies.items(), LOOKS, strict=False):
        values = policy["curves"]["latency_percentiles"]
        axes.plot(
            values, [at / 100 for at in range(len(values))], color=colour, linestyle=stroke, linewidth=1.9, label=name
        )
    for share, name in ((0.5, "median"), (0.95, "p95")):
        axes.axhline(share, color=_PALE, linewidth=0.9, zorder=0)
        axes.annotate(
            name, (0.995, share), xycoords=("axes fraction", "data"), va="bottom", ha="right", fontsize=8, color=_GREY
        )
    axes.set_ylim(0.0, 1.02)
    axes.set_xlim(left=0.0)
    dress(axes, "latency of a request, s", "share of requests", "latency")


def _over_time(axes: Axes, policies: Mapping[str, Any]) -> None:
    for (_, policy), (colour, stroke, _) in zip(policies.items(), LOOKS, strict=False):
        points = policy["curves"]["over_time"]
        axes.plot(
            [at for at, _, _ in points],
            [share for _, share, _ in points],
            color=colour,
            linestyle=stroke,
            linewidth=1.2,
        )
    axes.set_ylim(0.0, 1.02)
    dress(axes, "virtual time, s", "share of devices", "devices with a step under way")


def _bars(axes: Axes, policies: Mapping[str, Any], parts: Mapping[str, Any], title: str) -> None:
    width = 0.8 / len(parts)
    for part, (label, value) in enumerate(parts.items()):
        for place, (_, policy) in enumerate(policies.items()):
            colour = LOOKS[place % len(LOOKS)][0]
            height, at = value(policy), place + (part - (len(parts) - 1) / 2) * width
            axes.bar(at, height, width * 0.92, color=colour, alpha=1.0 if part == 0 else 0.45)
            text = f"{height:,.0f}" if height >= 10 else f"{height:.2f}"
            axes.annotate(
                text + (f"\n{label}" if len(parts) > 1 else ""),
                (at, height),
                ha="center",
                va="bottom",
                fontsize=8,
                color=_INK,
            )
    axes.set_xticks(range(len(policies)), list(policies), fontsize=9.5)
    axes.margins(y=0.18)
    dress(axes, "", "", title)


def _along(document: Mapping[str, Any]) -> Figure:
    """Return four measures over the value that varies between the cases."""
    figure = figure_of(12.6, 7.0, document["title"])
    for axes, (title, value) in zip(figure.subplots(2, 2).flat, _ALONG.items(), strict=True):
        _lines(axes, document["cases"], value)
        dress(axes, document["axis"], "", title)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9.5)
    return figure


def _lines(axes: Axes, cases: Sequence[Mapping[str, Any]], value: Any) -> None:
    for name, (colour, stroke, marker) in zip(cases[0]["policies"], LOOKS, strict=False):
        points = [(case["x"], value(case["policies"][name])) for case in cases]
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colour,
            linestyle=stroke,
            marker=marker,
            linewidth=1.8,
            label=name,
        )
    axes.set_ylim(bottom=0.0)
    axes.set_xticks([case["x"] for case in cases], [f"{case['x']:g}" for case in cases])


def dress(axes: Axes, x: str, y: str, title: str) -> None:
    """Set labels, title and the common style of all plots."""
    axes.set_xlabel(x, fontsize=9.5, color=_INK)
    axes.set_ylabel(y, fontsize=9.5, color=_INK)
    axes.set_title(title, loc="left", fontsize=10.5, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5)


def figure_of(width: float, height: float, title: str) -> Figure:
    """Return a figure that needs neither a display nor matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold", color=_INK)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure and return its path. Raises InputError if it cannot be written."""
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    return path
