"""Decode with sampling parameters beside greedy decoding, by turns in one process and engine.

    python -m benchmarks.serving.sampled STORE MODEL [--batch 1 16] [--tokens 48] [--pairs 5] [--threads N]
        [--prompt 32] [--only NAME…] [--output FILE]

Reported are milliseconds per step after each answer's first token: the time of a run less that of a run for one token.
Prompts have `--prompt` random tokens. `--only`: beginnings of the names of settings beside greedy. Ratios are over
greedy decoding, round by round: median and spread.
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
    "repetition penalty 1.1": {"repetition_penalty": 1.1},
    "frequency penalty .5": {"frequency_penalty": 0.5},
    "5 log-probabilities": {"logprobs": 5},
    "bias of 100 tokens": {"logit_bias": tuple((token, 1.0) for token in range(1000, 1100))},
}
_numbers = count()


def run(driver: ClusterDriver, model: str, size: tuple[int, int], tokens: int, setting: dict[str, Any]) -> float:
    """Return the seconds until all answers are complete. `size`: rows, and tokens of each prompt."""
    prompts = torch.randint(3, 1000, size, generator=torch.Generator().manual_seed(size[0])).tolist()
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


def step(driver: ClusterDriver, model: str, size: tuple[int, int], tokens: int, setting: dict[str, Any]) -> float:
    """Return milliseconds per step."""
    first = run(driver, model, size, 1, setting)
    return 1000 * (run(driver, model, size, tokens, setting) - first) / (tokens - 1)


def measure(
    driver: ClusterDriver, model: str, size: tuple[int, int], tokens: int, pairs: int, names: list[str]
) -> dict[str, Any]:
    """Return the times of settings and their ratios over the first."""
    rounds = [{name: step(driver, model, size, tokens, SETTINGS[name]) for name in names} for _ in range(pairs + 1)][
        1:
    ]  # the first round is a warm-up
    return {
        "batch": size[0],
        "ms": {name: statistics.median(one[name] for one in rounds) for name in names},
        "ratios": {name: spread([one[name] / one[names[0]] for one in rounds]) for name in names[1:]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding with sampling parameters beside greedy decoding.")
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base, *rest = SETTINGS
    names = [base, *(name for name in rest if name.startswith(tuple(args.only)))]
    config = EngineConfig(kv_cache_memory_bytes=1 << 30)
    with (
        Zoo(args.store, create=False) as zoo,
        start_one_device(zoo, config, Chosen((args.model,), ()), prefix_caching="off", credit=4) as driver,
    ):
        rows = [
            measure(driver, args.model, (batch, args.prompt), args.tokens, args.pairs, names) for batch in args.batch
        ]
    about = {"threads": args.threads, "prompt": args.prompt, "tokens": args.tokens, "pairs": args.pairs}
    deliver({**about, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
