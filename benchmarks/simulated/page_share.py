"""Compare pages with a fixed share of a device's memory and pages that get what weights leave, in the simulator.

    python -m benchmarks.simulated.page_share [--seeds 3] [--requests 300]

One A100 of 80 GB that cannot hold all of its models, loads beside steps, popularity by Zipf's law. Printed, per case
and seed: tokens per second, median and 95th percentile of latency, and loads, of both shares. Virtual time: the same
seeds give the same figures on any machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.sim.experiments.run import play
from runtime.sim.experiments.scenario import scenario_of
from runtime.sim.results.report import document_of

#: Cases: how models are provisioned, how many there are, in how many seconds 300 requests come, and the most that
#: weights get.
CASES = {
    "6 models, 60 % for weights": ("pm", 6, 30.0, 0.6),
    "6 models, 90 % for weights": ("pm", 6, 30.0, 0.9),
    "12 models, 80 % for weights": ("pm", 12, 60.0, 0.8),
    "30 models of shared blocks, 60 %": ("blocks", 30, 10.0, 0.6),
}
SHARES = ("fixed", "rest")


def run(case: str, pages: str, seed: int, requests: int) -> Mapping[str, Any]:
    """Return the document of one run. `pages`: as `ClusterSettings.pages`."""
    provision, count, seconds, weights = CASES[case]
    scenario = scenario_of(
        case,
        {
            "cluster": {
                "servers": [1], "disk": "nvlink3", "weights": weights, "loads": "beside", "host_cache": 10**12,
                "pages": pages,
            },
            "apps": {"count": count, "foundations": ["llama-7b"]},
            "asked": {
                "count": requests, "seconds": seconds * requests / 300, "prompts": "uniform:64-512",
                "answers": "uniform:64-512", "popularity": "skewed",
            },
            "policies": {"one": {"provision": provision, "page_layers": 32, "page_tokens": 128}},
        },
    )  # fmt: skip
    return document_of(play(scenario, "one", scenario.demand(seed)))


def rows(seeds: int, requests: int) -> Iterator[str]:
    """Yield a line of a table for each case and seed: fixed share, then what weights leave."""
    for case in CASES:
        for seed in range(seeds):
            both = [run(case, pages, seed, requests) for pages in SHARES]
            cells = (
                [f"{each['throughput_tokens']:.0f}" for each in both],
                [f"{each['latency']['p50']:.1f}" for each in both],
                [f"{each['latency']['p95']:.1f}" for each in both],
                [str(each["loads"]["count"]) for each in both],
            )
            yield f"| {case} | {seed} | " + " | ".join(", ".join(pair) for pair in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300)
    given = parser.parse_args()
    for row in rows(given.seeds, given.requests):
        print(row, flush=True)


if __name__ == "__main__":
    main()
