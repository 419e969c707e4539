"""Plot BlockLLM's figures from the documents of `benchmarks.simulated.figures`, with the paper's numbers in grey.

Four plots: overall, by applications, ablations, accuracy. Lines and bars are medians over seeds, whiskers minimum and
maximum.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.simulated.figures import Documents, over_seeds, ratio
from cli.simulate.plot import LOOKS, dress, figure_of, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {"blocks": "ours", "pm": "per model (pm)", "ps": "parameter sharing (ps)"}
_NONE = (None, None, None)
_PAPER = "#777777"
#: The paper's numbers, ours over pm: Table 2 by number of applications, Figure 22 with 30 applications.
_TABLE2 = {
    3: (4.6 / 5.4, 8.9 / 6.6),
    6: (5.2 / 7.6, 12.3 / 8.2),
    9: (9.9 / 14.4, 14.5 / 7.2),
    12: (12.4 / 17.6, 15.6 / 6.9),
}
_FIGURE22 = {30: (0.626, 1.85)}
#: The paper's ablations over ours: p50, p95 and tokens/s of each plotted policy; None where it has no number.
_ABLATED: Mapping[str, tuple[str, Mapping[str, tuple[float | None, ...]]]] = {
    "blockllm-kv": (
        "Figure 24: where rows run",
        {"recompute": (None, 1.23, None), "least-busy": (None, 1.36, None), "strict": _NONE},
    ),
    "blockllm-placement": (
        "Figure 26: placement",
        {"frag-min": (1.126, 1.182, None), "whole": _NONE},
    ),
    "blockllm-speculation": (
        "Figure 25: predicted hops",
        {"off": (1.113, 1.316, None), "ideal": (None, 0.873, 1.128)},
    ),
    "blockllm-adaptive": ("Figure 23: no equivalents", {"exact": (None, 1.156, 0.763)}),
}
_MEASURES = {"p50": "latency.p50", "p95": "latency.p95", "tokens/s": "throughput"}


def draw(found: Mapping[str, Documents], folder: Path) -> list[Path]:
    """Write four PNGs. `found` has the documents by preset. Raises InputError if one cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "overall": _overall(found["blockllm"], found["blockllm-load"]),
        "applications": _applications(found["blockllm-table2"], found["blockllm-apps"]),
        "ablations": _ablations(found),
        "accuracy": _accuracy(found["blockllm-accuracy"]),
    }
    return [save(figure, folder / f"simulated-{name}.png") for name, figure in pictures.items()]


def _overall(paper: Documents, load: Documents) -> Figure:
    """Plot latencies in both regimes of the paper; p95 and the share of time with a kernel over the load."""
    figure = figure_of(11.0, 6.4, "Figures 18 and 20: 12 A100, 20 applications")
    (left, right), (p95, kernels) = figure.subplots(2, 2)
    _cdf(left, paper, 0, f"latency at {paper[0]['cases'][0]['label']}")
    _cdf(right, paper, 1, f"latency with {paper[0]['cases'][1]['label']}")
    _along(p95, load, lambda run: run["latency"]["p95"], "p95 latency, s")
    _along(kernels, load, lambda run: run["kernels"], "share of time in which a kernel runs")
    for axes in (p95, kernels):
        axes.set_xscale("log", base=2)
        axes.set_xticks([case["x"] for case in load[0]["cases"]], [f"{case['x']:g}" for case in load[0]["cases"]])
        axes.set_xlabel("load, times the paper's", fontsize=9.5)
    _legend(figure, left)
    return figure


def _applications(table2: Documents, apps: Documents) -> Figure:
    """Plot ours over either baseline against the number of applications."""
    figure = figure_of(11.0, 6.4, "Table 2 and Figure 22: ours over per-model provisioning and over parameter sharing")
    above, below = figure.subplots(2, 2)
    _ratios(above[0], table2, "latency.mean", {x: pair[0] for x, pair in _TABLE2.items()}, "Table 2: mean latency")
    _ratios(above[1], table2, "throughput", {x: pair[1] for x, pair in _TABLE2.items()}, "Table 2: tokens per second")
    _ratios(below[0], apps, "latency.p95", {x: pair[0] for x, pair in _FIGURE22.items()}, "Figure 22: p95 latency")
    _ratios(below[1], apps, "throughput", {x: pair[1] for x, pair in _FIGURE22.items()}, "Figure 22: tokens per second")
    _legend(figure, below[0])
    return figure


def _ablations(found: Mapping[str, Documents]) -> Figure:
    """Plot each other policy over ours: median and p95 latency, tokens per second."""
    figure = figure_of(11.0, 6.8, "Ablations, over ours (grey: the paper's)")
    for axes, (preset, (title, others)) in zip(figure.subplots(2, 2).flat, _ABLATED.items(), strict=True):
        runs = found[preset]
        labels = []
        for other, paper in others.items():
            for case in range(len(runs[0]["cases"])):
                _group(axes, len(labels), runs, case, other, paper)
                labels.append(f"{other}\n{runs[0]['cases'][case]['label']}".strip())
        axes.axhline(1.0, color="#222222", linewidth=0.8)
        axes.set_xticks(range(len(labels)), labels)
        axes.set_xlim(-0.7, max(len(labels), 3) - 0.3)
        axes.margins(y=0.08)
        dress(axes, "", "", title + (" (load, times the paper's)" if runs[0]["axis"] else ""))
    _legend(figure, figure.axes[0])
    return figure


def _group(axes: Axes, place: int, runs: Documents, case: int, other: str, paper: Sequence[float | None]) -> None:
    """Draw three bars of one policy over ours, the first of its case, with the paper's marks."""
    ours = next(iter(runs[0]["cases"][case]["policies"]))
    for at, ((measure, name), mark) in enumerate(zip(_MEASURES.items(), paper, strict=True)):
        x = place + (at - 1) * 0.27
        _bar(
            axes, x, over_seeds(runs, case, ratio(name, other, ours)), 0.25, LOOKS[at][0], measure if not place else ""
        )
        if mark is not None:
            axes.plot([x - 0.12, x + 0.12], [mark, mark], color=_PAPER, linewidth=3.0, solid_capstyle="butt", zorder=5)


def _accuracy(runs: Documents) -> Figure:
    """Plot Figure 16: accuracy in each tenth of the time against its request rate, over all seeds; and latencies."""
    figure = figure_of(11.0, 3.6, "Figure 16: accuracy as the arrival rate changes, four A100")
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1.0))
    for at, (case, (colour, stroke, marker)) in enumerate(zip(runs[0]["cases"], LOOKS, strict=False)):
        policy = next(iter(case["policies"]))
        points = [point for run in runs for point in run["cases"][at]["policies"][policy]["accuracy"]["by_rate"]]
        if len({round(found, 6) for _, found in points}) == 1:  # only one model answered
            left.axhline(points[0][1], color=colour, linestyle=stroke, linewidth=1.4, label=case["label"])
        else:
            left.scatter(
                [rate for rate, _ in points],
                [found for _, found in points],
                s=22,
                color=colour,
                marker=marker,
                label=case["label"],
            )
        for place, percent in enumerate(("p50", "p95")):
            values = over_seeds(runs, at, lambda all_, policy=policy, percent=percent: all_[policy]["latency"][percent])
            _bar(right, place + (at - 1) * 0.27, values, 0.25, colour, "")
    left.axhline(0.421, color=_PAPER, linewidth=1.4, linestyle="--")
    left.annotate(
        "the paper's mean",
        (0.99, 0.421),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=8,
        color=_PAPER,
    )
    dress(left, "requests per second, a tenth of the time each", "", "accuracy of what answered (MMLU)")
    right.set_xticks((0, 1), ("p50", "p95"))
    dress(right, "", "", "latency, s")
    _legend(figure, left)
    return figure


def _cdf(axes: Axes, runs: Documents, case: int, title: str) -> None:
    """Plot the median over seeds of every percentile."""
    for name, (colour, stroke, _) in zip(_NAMES, LOOKS, strict=False):
        curves = [run["cases"][case]["policies"][name]["curves"]["latency_percentiles"] for run in runs]
        values = [statistics.median(column) for column in zip(*curves, strict=True)]
        axes.plot(
            values,
            [at / 100 for at in range(len(values))],
            color=colour,
            linestyle=stroke,
            linewidth=1.9,
            label=_NAMES[name],
        )
    axes.set_ylim(0.0, 1.02)
    axes.set_xlim(left=0.0)
    dress(axes, "seconds", "share of requests", title)


def _along(axes: Axes, runs: Documents, value: Callable[[Mapping[str, Any]], float], title: str) -> None:
    for name, look in zip(runs[0]["cases"][0]["policies"], LOOKS, strict=False):
        _line(axes, runs, lambda all_, name=name: value(all_[name]), look, _NAMES[name])
    _from_zero(axes)
    dress(axes, "", "", title)


def _ratios(axes: Axes, runs: Documents, name: str, paper: Mapping[int, float], title: str) -> None:
    ours, *others = runs[0]["cases"][0]["policies"]
    for other, look in zip(others, LOOKS[1:], strict=False):
        _line(axes, runs, ratio(name, ours, other), look, f"over {_NAMES[other]}")
    axes.plot(
        list(paper),
        list(paper.values()),
        color=_PAPER,
        linestyle=":",
        marker="x",
        linewidth=1.4,
        label="the paper's, over pm",
    )
    axes.axhline(1.0, color="#222222", linewidth=0.8)
    axes.set_xticks([case["x"] for case in runs[0]["cases"]], [f"{case['x']:g}" for case in runs[0]["cases"]])
    _from_zero(axes)
    dress(axes, "applications", "", title)


def _line(
    axes: Axes, runs: Documents, value: Callable[[Mapping[str, Any]], float | None], look: Sequence[str], label: str
) -> None:
    colour, stroke, marker = look
    points = [(case["x"], over_seeds(runs, at, value)) for at, case in enumerate(runs[0]["cases"])]
    middles = [statistics.median(values) for _, values in points]
    ends = [
        [abs(edge(values) - middle) for (_, values), middle in zip(points, middles, strict=True)] for edge in (min, max)
    ]
    axes.errorbar(
        [x for x, _ in points],
        middles,
        yerr=ends,
        color=colour,
        linestyle=stroke,
        marker=marker,
        linewidth=1.8,
        capsize=3.0,
        label=label,
    )


def _from_zero(axes: Axes) -> None:
    axes.margins(y=0.1)
    axes.autoscale_view()
    axes.set_ylim(bottom=0.0)


def _bar(axes: Axes, x: float, values: Sequence[float], width: float, colour: str, label: str) -> None:
    middle = statistics.median(values)
    axes.bar(x, middle, width, color=colour, label=label or None)
    axes.errorbar(
        x, middle, yerr=[[middle - min(values)], [max(values) - middle]], color="#222222", linewidth=1.0, capsize=2.5
    )


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9.5)
