"""Measure low-rank deltas of full fine-tunes: similarity, accuracy and perplexity against rank and bytes.

    python -m benchmarks.surgery.deltas --store DIR MODEL[=TEXT]... [--base MODEL] [--ranks 1 2 4 …]
        [--output FILE.json] [--plot FILE.png]

All on held-out text. Four ways to use the same number of elements:
- activation-aware factors, with ranks by each matrix's benefit;
- the same with the base's norms;
- the same with token table and head stored in full;
- plain truncated SVD with one rank for all (the control).

Bytes are what each adds to the base, as a share of what the exact fine-tune adds. No model is added to the store.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from surgery.deltas.curve import compare_stacks
from surgery.deltas.make import DeltaOptions, DeltaWork, opened
from surgery.deltas.study import layer_ends
from surgery.deltas.windows import read_windows
from surgery.families.settings import context_length
from surgery.modules.stack import open_stack
from zoo import Zoo

RANKS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
WAYS: dict[str, dict[str, Any]] = {
    "aware, ranks by worth": {"embeddings": "lowrank"},
    "… with the base's norms": {"embeddings": "lowrank", "norms": "fold"},
    "… with head and table whole": {"embeddings": "exact"},
    "plain SVD, one rank": {"embeddings": "lowrank", "aware": False, "allocation": "even"},
}
_STYLE = {"#0072B2": "o", "#009E73": "s", "#CC79A7": "^", "#D55E00": "x"}


def measure(
    zoo: Zoo, name: str, base: str | None, text: str | None, ranks: tuple[int, ...], device: str
) -> dict[str, Any]:
    """Measure all ways and ranks of one fine-tune."""
    model = zoo.model(name)
    windows = read_windows(model, text, context_length(model.config))
    ways: dict[str, Any] = {}
    ends: dict[str, Any] = {}
    for way, options in WAYS.items():
        with opened(
            zoo.store, model.name, windows, DeltaOptions(max(ranks), **options, device=device, base=base)
        ) as work:
            points = [work.curve.at(rank) for rank in ranks if rank <= work.curve.highest]
            ways[way] = [
                {"rank": p.rank, "bytes": p.bytes, "share": p.bytes / work.bytes_exact, **asdict(p.score)}
                for p in points
            ]
            ends = ends or references(zoo, work, windows.held, device)
    return {
        "model": model.name,
        "base": base or model.base,
        "text": text,
        "probe": windows.digest,
        **ends,
        "ways": ways,
    }


@torch.inference_mode()
def references(zoo: Zoo, work: DeltaWork, held: torch.Tensor, device: str) -> dict[str, Any]:
    """Return the scores of the exact fine-tune and of the base on the same windows."""
    at = layer_ends(work.exact)[-1]

    def score(manifest: Any) -> dict[str, float]:
        return asdict(compare_stacks(work.studied, open_stack(zoo.store, manifest, device), held, [at])[at])

    return {
        "bytes_exact": work.bytes_exact,
        "tokens": held.numel(),
        "exact": score(work.exact),
        "of_base": score(work.base),
    }


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Plot similarity and accuracy over bytes, a row per fine-tune, with marks at 25 % and at the target."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 4.3 * len(results) + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(results), 2, squeeze=False)
    for row, result in zip(grid, results, strict=True):
        for axes, field, title in zip(
            row, ("similarity", "accuracy"), ("Similarity at the head", "Next-token accuracy"), strict=True
        ):
            _curves(axes, result, field)
            axes.set_title(f"{title}: {result['model']}", loc="left", fontsize=12, fontweight="bold")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def _curves(axes: Any, result: dict[str, Any], field: str) -> None:
    for (way, points), (colour, marker) in zip(result["ways"].items(), _STYLE.items(), strict=True):
        axes.plot(
            [p["share"] for p in points],
            [p[field] for p in points],
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.6,
            label=way,
        )
    axes.axvline(0.25, color="#777777", linewidth=0.9, linestyle=":")
    low, high = result["of_base"][field], result["exact"][field]
    for value, words in ((low, "base"), (high, "exact fine-tune")):
        axes.axhline(value, color="#777777", linewidth=0.9, linestyle="--")
        axes.annotate(
            words,
            (0.995, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=9,
            color="#555555",
        )
    if field == "similarity":
        axes.axhline(0.98, color="#777777", linewidth=0.9, linestyle=":")
        axes.annotate(
            "0.98",
            (0.995, 0.98),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=9,
            color="#555555",
        )
    axes.set_xscale("log")
    ticks = [0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0]
    axes.set_xticks(ticks, [f"{tick:.1%}" if tick < 0.01 else f"{tick:.0%}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.004, 1.0)
    axes.set_xlabel("bytes, as a share of the exact fine-tune's own")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Low-rank deltas against rank and bytes.")
    parser.add_argument("models", nargs="+", metavar="MODEL[=TEXT]")
    parser.add_argument("--store", type=Path, default=Path("zoo_store"))
    parser.add_argument("--base", help="of fine-tunes that share nothing with theirs")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    results = []
    with Zoo(arguments.store, create=False) as zoo:
        for named in arguments.models:
            name, _, text = named.partition("=")
            results.append(
                measure(zoo, name, arguments.base, text or None, tuple(sorted(arguments.ranks)), arguments.device)
            )
    document = {
        "versions": {p: version(p) for p in ("torch", "transformers")},
        "device": arguments.device,
        "results": results,
    }
    text = json.dumps(document, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    if arguments.plot:
        plot(results, arguments.plot)
    print(text)


if __name__ == "__main__":
    main()
