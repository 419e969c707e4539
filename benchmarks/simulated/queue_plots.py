"""Plot documents of `benchmarks.simulated.many_queues` beside QLM's figures (10, 16 and 20).

    python -m benchmarks.simulated.queue_plots FOLDER PICTURE

FOLDER has the `--output` of the experiments as interactive.json, bursts.json, slo.json, mixed.json and mega.json. Lines
are medians over seeds, whiskers the least and the greatest.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.simulate.plot import LOOKS, dress, figure_of, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: File, measure, title of the panel; what the labels of its cases have in common, which the axis says instead.
_PANELS: Sequence[tuple[str, str, str, str]] = (
    ("interactive", "requests_per_second", "requests per second", " interactive"),
    ("interactive", "interactive", "interactive requests on time", " interactive"),
    ("bursts", "interactive", "on time, interactive; all requests within", "within "),
    ("slo", "all", "all requests on time; objectives times", "objectives x "),
    ("mixed", "requests_per_second", "requests per second, one model", ""),
    ("mega", "requests_per_second", "requests per second; share of mega prompts", " mega prompts"),
)
_ORDERS = ("qlm", "edf", "edf, strict", "fcfs", "turns")
_POINTS = 8.5
#: The paper's least share of interactive requests on time, where they are less than 5 % of all.
_PAPER = 0.9


def draw(documents: Mapping[str, Mapping[str, Any]], picture: Path) -> Path:
    """Write a PNG of six panels; a document that is missing leaves its panels empty. Raises InputError."""
    figure = figure_of(12.6, 7.0, "Orders of requests for more models than fit (QLM)")
    panels = figure.subplots(2, 3)
    for axes, (name, measure, title, common) in zip(panels.flat, _PANELS, strict=True):
        runs = {
            label: policies
            for label, policies in documents.get(name, {}).get("runs", {}).items()
            if not (name == "interactive" and label.startswith("one model"))
        }
        for order, look in zip(_ORDERS, LOOKS, strict=True):
            _line(axes, runs, order, measure, look)
        axes.set_xticks(range(len(runs)), [label.replace(common, "") if common else label for label in runs])
        axes.tick_params(axis="x", labelsize=_POINTS)
        axes.set_ylim(bottom=0.0)
        if measure == "interactive" and name == "interactive":
            axes.axhline(_PAPER, color="#777777", linestyle=":", linewidth=1.2)
        dress(axes, "", "", title)
    handles = {
        label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower left", ncols=5, frameon=False, fontsize=9.5)
    return save(figure, picture)


def _line(axes: Axes, runs: Mapping[str, Any], order: str, measure: str, look: Sequence[str]) -> None:
    found = {
        at: [run[measure] for run in policies[order]]
        for at, policies in enumerate(runs.values())
        if policies.get(order)
    }
    if not found:
        return
    middles = [statistics.median(values) for values in found.values()]
    ends = [[abs(edge(values) - middle) for values, middle in zip(found.values(), middles, strict=True)]
            for edge in (min, max)]  # fmt: skip
    colour, stroke, marker = look
    axes.errorbar(
        list(found), middles, yerr=ends, color=colour, linestyle=stroke, marker=marker, linewidth=1.8, capsize=3.0,
        label=order,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    documents = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in given.folder.glob("*.json")}
    print(draw(documents, given.picture))


if __name__ == "__main__":
    main()
