"""Reproduce BlockLLM's Figures 5, 7, 16 and 18 to 26 and Tables 1 and 2 with the simulator over several seeds.

    python -m benchmarks.simulated.figures FOLDER [--seeds 3] [--preset NAME]... [--figures PICTURES]

Writes documents, tables with the paper's numbers, and plots. A preset and seed with a document in the folder is not run
again: NAME-SEED.json, as `zoo simulate --preset NAME --seed SEED --json` writes it.

Tables have medians over seeds and, in brackets, minimum and maximum. Everything is in virtual time, so the same seeds
give the same tables on any machine. It takes about ten minutes of one core per seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.simulated.redundancy import figure5, shared_weights
from runtime.sim.experiments.presets import preset_named
from runtime.sim.experiments.study import run_study
from runtime.sim.results.report import ratios

#: Presets that compare Block Zoo with the baselines, presets that switch off one part of it, and the accuracy preset.
OVERALL = ("blockllm", "blockllm-load", "blockllm-apps", "blockllm-table2")
ABLATIONS = ("blockllm-kv", "blockllm-placement", "blockllm-speculation", "blockllm-adaptive")
LADDER, PARTS, LOADS, SWAP = "blockllm-accuracy", "blockllm-figure7", "blockllm-load", "blockllm-swap"
EVERY = (*OVERALL, SWAP, *ABLATIONS, LADDER, PARTS)
#: A load is sustained if this share of the requests ends soon, and within its objective if this share meets that.
_SOON, _MET = 0.95, 0.90
Documents = Sequence[Mapping[str, Any]]
Columns = Mapping[str, tuple[Callable[[Mapping[str, Any]], float], int]]
_RATIOS = {
    "mean": "latency.mean",
    "p50": "latency.p50",
    "p95": "latency.p95",
    "tokens/s": "throughput",
    "to 90 %": "throughput, until 90 %",
    "busy": "utilisation",
    "kernels": "kernels",
    "weights": "weights",
    "K and V": "kv",
}
_PARTS: Columns = {
    name: (lambda run, name=name: run["parts"][name], 3)  # type: ignore[misc]
    for name in ("compute", "between_servers", "inside_servers")
}
_EACH: Columns = {
    "in system": (lambda run: run["in_system"], 1),
    "in time": (lambda run: run["slo"]["met"], 2),
    "mean": (lambda run: run["latency"]["mean"], 2),
    "p50": (lambda run: run["latency"]["p50"], 2),
    "p95": (lambda run: run["latency"]["p95"], 2),
    "first token": (lambda run: run["ttft"]["mean"], 2),
    "ms per token": (lambda run: run["tpot"]["mean"] * 1e3, 1),
    "tokens/s": (lambda run: run["throughput_tokens"], 0),
    "busy": (lambda run: run["utilisation"], 2),
    "kernels": (lambda run: run["kernels"], 2),
    "GB between": (lambda run: run["communication"]["between"]["bytes"] / 1e9, 1),
    "GB inside": (lambda run: run["communication"]["inside"]["bytes"] / 1e9, 1),
    "moves": (lambda run: run["counts"]["moves"], 0),
    "GB loaded": (lambda run: run["loads"]["bytes"] / 1e9, 0),
    "adapted": (lambda run: run["adapted"], 0),
    "predicted": (lambda run: run["counts"]["speculations"], 0),
    "stood": (lambda run: run["counts"]["speculation_hits"], 0),
}
#: Figure 16: over all requests, and over the tenths of the time with the fewest and the most requests.
_ACCURACY: Columns = {
    "accuracy": (lambda run: run["accuracy"]["mean"], 3),
    "fewest requests": (lambda run: run["accuracy"]["by_rate"][0][1], 3),
    "most requests": (lambda run: run["accuracy"]["by_rate"][-1][1], 3),
}


def documents(folder: Path, name: str, seeds: int) -> list[dict[str, Any]]:
    """Return one document per seed, running those that the folder does not have."""
    found = []
    for seed in range(seeds):
        path = folder / f"{name}-{seed}.json"
        if not path.exists():
            path.write_text(json.dumps(run_study(preset_named(name), seed)) + "\n", encoding="utf-8")
        found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


def over_seeds(runs: Documents, case: int, value: Callable[[Mapping[str, Any]], float | None]) -> list[float]:
    """Return `value` of one case's policies for each seed, except where it is None."""
    return [each for run in runs if (each := value(run["cases"][case]["policies"])) is not None]


def ratio(name: str, ours: str, other: str) -> Callable[[Mapping[str, Any]], float | None]:
    """Return a function of a case's policies: one of `report.ratios` of two policies, None if it is undefined."""
    return lambda policies: ratios(policies[ours], policies[other]).get(name)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return a text such as `.98 [.97, 1.02]`: median, minimum and maximum."""
    if not values:
        return "–"
    middle, least, most = (_short(each, digits) for each in (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 or least == most else f"{middle} [{least}, {most}]"


def overall(runs: Documents, names: Iterable[str] = _RATIOS) -> list[list[str]]:
    """Return ours over each baseline, a row per case and baseline."""
    rows = []
    for at, case in enumerate(runs[0]["cases"]):
        ours, *others = case["policies"]
        for other in others:
            cells = (spread(over_seeds(runs, at, ratio(_RATIOS[name], ours, other))) for name in names)
            rows.append([case["label"] or runs[0]["preset"], other, *cells])
    return rows


def greatest(runs: Documents) -> list[list[str]]:
    """Return a row for each policy: the greatest load that it sustains, with its tokens/s, and its goodput.

    Loads are the cases of the preset, so they are greatest among those. Goodput: the most requests per second that meet
    the objective, at a load at which enough of them do.
    """
    rows = [["policy", "greatest sustained load, x", "tokens/s there", "load in time, x", "goodput, requests/s"]]
    for name in runs[0]["cases"][0]["policies"]:
        cells: list[list[float]] = [[], [], [], []]
        for run in runs:
            some = [(case["x"], case["policies"][name]) for case in run["cases"]]
            soon = [(x, each["throughput_tokens"]) for x, each in some if each["slo"]["soon"] >= _SOON]
            good = [(x, each["slo"]["goodput"]) for x, each in some if each["slo"]["met"] >= _MET]
            for column, value in zip(cells, (*max(soon, default=(0, 0)), *max(good, default=(0, 0))), strict=True):
                column.append(value)
        rows.append([name, *(spread(column, digits) for column, digits in zip(cells, (0, 0, 0, 2), strict=True))])
    return rows


def each(runs: Documents, columns: Columns) -> list[list[str]]:
    """Return a row for every policy of every case.

    `columns` has a function of a policy's document and a number of digits.
    """
    rows = [["case", "policy", *columns]]
    for at, case in enumerate(runs[0]["cases"]):
        for name in case["policies"]:
            cells = (
                spread(over_seeds(runs, at, partial(_of, name, value)), digits) for value, digits in columns.values()
            )
            rows.append([case["label"], name, *cells])
    return rows


def ablations(runs: Documents) -> list[list[str]]:
    """Return each other policy over ours (the first one), a row per case and policy."""
    names = {
        "p50": "latency.p50",
        "p95": "latency.p95",
        "tokens/s": "throughput",
        "bytes": "communication",
        "between": "between servers",
    }
    rows = [["case", "policy", *names]]
    for at, case in enumerate(runs[0]["cases"]):
        ours, *others = case["policies"]
        for other in others:
            cells = (spread(over_seeds(runs, at, ratio(name, other, ours))) for name in names.values())
            rows.append([case["label"] or runs[0]["preset"], other, *cells])
    return rows


def show(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table; its first row is the head."""
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    print(f"\n{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--preset", action="append", choices=EVERY)
    parser.add_argument("--figures", type=Path, help="write the pictures into this folder; for all presets")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    found = {}
    if not options.preset:
        show("Table 1", shared_weights())
        show("Figure 5", figure5(options.seeds))
    for name in options.preset or EVERY:
        runs = found[name] = documents(options.folder, name, options.seeds)
        if name in (*OVERALL, SWAP):
            show(f"{name}, ours over theirs", [["case", "over", *_RATIOS], *overall(runs)])
        elif name == PARTS:
            show(f"{name}, parts of a token's latency", each(runs, _PARTS))
        elif name in ABLATIONS:
            show(f"{name}, the others over ours", ablations(runs))
        else:
            show(f"{name}, accuracy", each(runs, _ACCURACY))
        if name == LOADS:
            show(f"{name}, greatest load", greatest(runs))
        show(f"{name}, each", each(runs, _EACH))
    if options.figures and not options.preset:
        from benchmarks.simulated.plots import draw

        draw(found, options.figures)


def _of(name: str, value: Callable[[Mapping[str, Any]], float], policies: Mapping[str, Any]) -> float:
    return value(policies[name])


def _short(value: float, digits: int) -> str:
    text = f"{value:,.{digits}f}"
    return text[1:] if text.startswith("0.") else text


if __name__ == "__main__":
    main()
