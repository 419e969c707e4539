"""Decode with sampling parameters beside greedy decoding, by turns in one process and engine.

    python -m benchmarks.serving.sampled STORE MODEL [--batch 1 16] [--tokens 48] [--pairs 5] [--threads N]
        [--output FILE]

Reported are milliseconds per step after each answer's first token: the time of a run less that of a run for one token.
Prompts have 32 random tokens. Ratios are over greedy decoding, round by round: median and spread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports import deliver
from benchmarks.serving.shared_family import spread
from cli.serving.models import Chosen
from cli.serving.one_device import start_one_device
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import EngineConfig
from runtime.types import SamplingParams, SequenceRequest
from zoo.api import Zoo

#: The first one is what the ratios are over.
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "temperature .7, top-p .9": {"temperature": 0.7, "top_p": 0.9},
    "temperature 1, top-p .95": {"temperature": 1.0, "top_p": 0.95},
    "temperature .6, top-k 20, top-p .95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "temperature 1, min-p .05": {"temperature": 1.0, "min_p": 0.05},
}
_PROMPT = 32
_numbers = count()


def run(driver: ClusterDriver, model: str, batch: int, tokens: int, setting: dict[str, Any]) -> float:
    """Return the seconds until all answers are complete."""
    prompts = torch.randint(3, 1000, (batch, _PROMPT), generator=torch.Generator().manual_seed(batch)).tolist()
    requests = [
        SequenceRequest(
            f"s{next(_numbers)}", "r", model, tuple(prompt),
            SamplingParams(max_tokens=tokens, ignore_eos=True, seed=at, **setting),
        )
        for at, prompt in enumerate(prompts)
    ]  # fmt: skip
    begin = time.perf_counter()
    for _ in driver.run(requests):
        pass
    return time.perf_counter() - begin


def step(driver: ClusterDriver, model: str, batch: int, tokens: int, setting: dict[str, Any]) -> float:
    """Return milliseconds per step of `batch` rows."""
    first = run(driver, model, batch, 1, setting)
    return 1000 * (run(driver, model, batch, tokens, setting) - first) / (tokens - 1)


def measure(driver: ClusterDriver, model: str, batch: int, tokens: int, pairs: int) -> dict[str, Any]:
    """Return the times of all settings and their ratios over the first."""
    base = next(iter(SETTINGS))
    rounds = [
        {name: step(driver, model, batch, tokens, setting) for name, setting in SETTINGS.items()}
        for _ in range(pairs + 1)
    ][1:]  # the first round is a warm-up
    return {
        "batch": batch,
        "ms": {name: statistics.median(one[name] for one in rounds) for name in SETTINGS},
        "ratios": {name: spread([one[name] / one[base] for one in rounds]) for name in SETTINGS if name != base},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding with sampling parameters beside greedy decoding.")
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = EngineConfig(kv_cache_memory_bytes=64 << 20)
    with (
        Zoo(args.store, create=False) as zoo,
        start_one_device(zoo, config, Chosen((args.model,), ()), prefix_caching="off", credit=4) as driver,
    ):
        rows = [measure(driver, args.model, batch, args.tokens, args.pairs) for batch in args.batch]
    deliver({"threads": args.threads, "tokens": args.tokens, "pairs": args.pairs, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
