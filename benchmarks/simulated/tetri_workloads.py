"""Run TetriInfer's five workloads beside one device that does everything, as vLLM did (section 5.1; TI-28, TI-29).

    python -m benchmarks.simulated.tetri_workloads [--seeds 3] [--requests 128] [--predicting .1] [--plot FILE] [--json]
    python -m benchmarks.simulated.tetri_workloads --orders

OPT-13B; a device is two V100 that split each layer. Requests come at once, as the paper's do. Prompts are light (median
18 tokens) or heavy (above 512), answers light (up to 128) or heavy (above).

- `vllm`: one device; prompts run whole, in steps with decodes; 16 sequences at a time, greedy pages.
- `roce`, `nvlink`: one device for prompts, one that decodes; 512 tokens in a chunk, shortest prompt first in windows of
  16, forecasts of 200 tokens right in 74.9 %, dynamic reservation, two choices; K and V over 200 Gbit/s or 300 GB/s.
  The predictor, beside prompts, takes a tenth of their time (Figure 17).
- `ours`: as `roce`, with peak reservation and the default choice.
- `vllm 256`: as `vllm`, with 256 sequences and chunks of 512: what such a device does today.

First tokens leave where prompts ran, before K and V travel (TI-18). Resource time: from the first to the last use of
each device. perf/$ by the paper's formula, (1 + x) / ratio, and by the usual one, 1 / ((1 - x) ratio); x is the share
by which the mean time of a request falls, ratio that of resource times (TI-28). `--orders`: orders of prompts and their
windows, with the mixed workload (section 5.2.1). Times are virtual.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulated.tetri_decode import LONGEST
from runtime.sim.experiments.preset import LOADED, STILL
from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import scenario_of
from runtime.sim.workload.requests import Demand

#: Share of heavy prompts and of heavy answers.
WORKLOADS: Mapping[str, tuple[float, float]] = {
    "LPLD": (0.0, 0.0), "LPHD": (0.0, 1.0), "HPLD": (1.0, 0.0), "HPHD": (1.0, 1.0), "Mixed": (0.5, 0.5),
}  # fmt: skip
#: Changes by TetriInfer that the paper reports, in percent: first token, whole request, resources; perf/$ beside vLLM.
PAPER: Mapping[str, tuple[float, float, float | None, float]] = {
    "LPLD": (-44, -40, None, 1.4), "LPHD": (-97, -47, -38, 2.4), "HPLD": (-9, -23, 43, 0.86),
    "HPHD": (float("nan"), -19, 7, 1.1), "Mixed": (-85, -50, -21, 1.9),
}  # fmt: skip
_TETRI: Mapping[str, Any] = {
    "roles": ["prefill", "decode"], "prefill_chunk": 512, "max_num_batched_tokens": 512, "max_num_seqs": 256,
    "prefill_order": "sjf", "prefill_window": 16,
    "decode": {"admission": "dynamic", "choice": "po2", "grain": "request"},
}  # fmt: skip
_WHOLE: Mapping[str, Any] = {"prefill_chunk": LONGEST, "max_num_batched_tokens": 2 * LONGEST, "max_num_seqs": 16}
SYSTEMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "vllm": ("nvlink3", _WHOLE),
    "roce": ("ts-roce", _TETRI),
    "nvlink": ("ts-nvlink", _TETRI),
    "ours": ("ts-roce", {**_TETRI, "decode": {"admission": "peak", "grain": "request"}}),
    "vllm 256": ("nvlink3", {"prefill_chunk": 512, "max_num_batched_tokens": 512, "max_num_seqs": 256}),
}
#: Share by which the predictor of lengths slows prompts, where both run on one device (Figure 17).
PREDICTING = 0.1
#: Orders of prompts, each with its window.
ORDERS = (("fcfs", 16), ("sjf", 16), ("ljf", 16), ("sjf", 64), ("sjf", 128))
#: Requests before all, for devices to load their weights.
_WARM = 40
_START = round(LOADED * 1e9)


@dataclass(frozen=True, slots=True)
class WorkloadRun:
    """Mean seconds until the first token and until the end, the longest gap (99 %), and resource seconds."""

    first: float
    whole: float
    gap: float
    resources: float


def demand(workload: str, requests: int, seed: int) -> Demand:
    """Return requests that come at once."""
    draws = np.random.default_rng(seed)
    heavy = [np.arange(requests) < round(share * requests) for share in WORKLOADS[workload]]
    heavy[1] = draws.permutation(heavy[1])
    light_prompt = np.clip(draws.lognormal(np.log(18), 0.6, requests), 4, 512)
    heavy_prompt = np.clip(draws.lognormal(np.log(700), 0.3, requests), 513, 1024)
    light_answer = np.clip(draws.lognormal(np.log(60), 0.6, requests), 4, 128)
    heavy_answer = np.clip(draws.lognormal(np.log(300), 0.5, requests), 129, 1000)
    prompt = np.where(heavy[0], heavy_prompt, light_prompt).astype(np.int64)
    answer = np.where(heavy[1], heavy_answer, light_answer).astype(np.int64)
    order = draws.permutation(requests)
    at = np.full(requests + _WARM, _START, dtype=np.int64)
    at[:_WARM] = _START // 2
    prompt, answer = (np.concatenate([np.full(_WARM, warm), each[order]]) for warm, each in ((4, prompt), (8, answer)))
    return Demand(("opt-13b",), at, np.zeros(len(at), dtype=np.int64), prompt, answer)


def run(
    workload: str, system: str, requests: int, seed: int, predicting: float = PREDICTING, **changed: Any
) -> WorkloadRun:
    """Run a workload on a system, with other settings if given. `predicting`: share of prompts' time."""
    net, settings = SYSTEMS[system]
    settings = {**settings, **changed}
    apart = "roles" in settings
    tables = {
        "cluster": {"gpu": "2xV100-tetri", "servers": [1] * (1 + apart), "weights": 0.95, "net": net},
        "apps": {"ladder": ["opt-13b"], "accuracy": [1.0]},
        "asked": {"longest": LONGEST},
        "policies": {
            "one": {
                "provision": "blocks", "parts": 1, "page_layers": 40, "max_model_len": LONGEST, "control": STILL,
                "placement": "replicate", **settings,
                "lengths": {
                    "hidden": True, "granularity": 200, "accuracy": 0.749, "seed": seed, "slows": apart * predicting,
                },
            }
        },
    }  # fmt: skip
    ledger = play(scenario_of("tetri-workloads", tables), "one", demand(workload, requests, seed)).ledger
    first, ended, gap = (
        (np.array(each, dtype=float)[_WARM:] - start) / 1e9
        for each, start in ((ledger.first, _START), (ledger.ended, _START), (ledger.gap, 0))
    )
    resources = float(ended.max())
    if apart:  # prompts until the last first token; decoding from the first one on
        resources = float(first.max() + ended.max() - first.min())
    return WorkloadRun(float(first.mean()), float(ended.mean()), float(np.quantile(gap, 0.99)), resources)


def beside(one: WorkloadRun, base: WorkloadRun) -> dict[str, float]:
    """Return changes in percent, and both definitions of perf/$ (TI-28)."""
    x, ratio = 1 - one.whole / base.whole, one.resources / base.resources
    return {
        "first": 100 * (one.first / base.first - 1),
        "whole": -100 * x,
        "gap": 100 * (one.gap / base.gap - 1),
        "resources": 100 * (ratio - 1),
        "perf_paper": (1 + x) / ratio,
        "perf_usual": 1 / ((1 - x) * ratio),
    }


def orders(requests: int, seeds: Sequence[int]) -> dict[str, float]:
    """Return the mean seconds to the first token of the baseline and of each order."""
    found = {"vllm": float(np.mean([run("Mixed", "vllm", requests, seed).first for seed in seeds]))}
    for order, window in ORDERS:
        settings = {"prefill_order": order, "prefill_window": window}
        runs = [run("Mixed", "roce", requests, seed, **settings) for seed in seeds]
        found[f"{order} {window}"] = float(np.mean([one.first for one in runs]))
    return found


def table(requests: int, seeds: Sequence[int], predicting: float) -> dict[str, dict[str, list[WorkloadRun]]]:
    return {
        workload: {system: [run(workload, system, requests, seed, predicting) for seed in seeds] for system in SYSTEMS}
        for workload in WORKLOADS
    }


def mean_beside(runs: Mapping[str, Sequence[WorkloadRun]], system: str, base: str = "vllm") -> dict[str, float]:
    """Return the means over seeds of `beside`."""
    each = [beside(one, two) for one, two in zip(runs[system], runs[base], strict=True)]
    return {name: float(np.mean([one[name] for one in each])) for name in each[0]}


def draw(found: Mapping[str, Mapping[str, Sequence[WorkloadRun]]], path: Path) -> None:
    """Draw the changes beside the paper's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 4, figsize=(15, 3.8))
    shown = (("first", "first token, %"), ("whole", "whole request, %"), ("resources", "resource time, %"),
             ("perf_paper", "perf/$, the paper's formula"))  # fmt: skip
    for at, (panel, (name, title)) in enumerate(zip(panels, shown, strict=True)):
        places = np.arange(len(found))
        for number, system in enumerate(("roce", "nvlink", "ours")):
            heights = [mean_beside(runs, system)[name] for runs in found.values()]
            panel.bar(places + 0.25 * (number - 1), heights, 0.25, label=system)
        values = [PAPER[workload][at] for workload in found]
        panel.plot(places, [np.nan if each is None else each for each in values], "kD", label="the paper")
        panel.axhline(1 if name == "perf_paper" else 0, color="grey", linewidth=0.8)
        panel.set_xticks(places, list(found))
        panel.set_title(title)
    panels[-1].legend()
    figure.suptitle("beside one device that runs everything, 16 sequences at a time")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--predicting", type=float, default=PREDICTING, help="share of prompts' time")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--orders", action="store_true", help="orders of prompts instead")
    given = parser.parse_args(arguments)
    if given.orders:
        print(json.dumps(orders(given.requests, range(given.seeds))))
        return 0
    found = table(given.requests, range(given.seeds), given.predicting)
    if given.plot is not None:
        draw(found, given.plot)
    if given.json:
        print(json.dumps({name: {system: [asdict(one) for one in runs] for system, runs in some.items()}
                          for name, some in found.items()}))  # fmt: skip
        return 0
    print(f"{'':>6} {'':>9} {'first s':>8} {'whole s':>8} {'gap s':>7} {'first':>7} {'whole':>7} {'res.':>7} "
          f"{'perf/$':>7} {'usual':>7}")  # fmt: skip
    for workload, some in found.items():
        for system, runs in some.items():
            mean = {name: np.mean([getattr(one, name) for one in runs]) for name in ("first", "whole", "gap")}
            change = mean_beside(some, system)
            print(f"{workload:>6} {system:>9} {mean['first']:>8.2f} {mean['whole']:>8.2f} {mean['gap']:>7.2f} "
                  f"{change['first']:>6.0f}% {change['whole']:>6.0f}% {change['resources']:>6.0f}% "
                  f"{change['perf_paper']:>7.2f} {change['perf_usual']:>7.2f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
