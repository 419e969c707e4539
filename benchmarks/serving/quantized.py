"""Decode with quantised models beside the exact one, by turns in one process, each in an engine of its own.

    python -m benchmarks.serving.quantized STORE EXACT QUANTIZED… [--batch 1 4 16] [--tokens 64] [--pairs 5]
        [--threads N] [--output FILE]

A model name may end with `:decompress`, for int8 weights that are decompressed on loading. Reported are tokens per
second after each answer's first token: the time of a run less that of a run for one token. Prompts have 32 random
tokens, decoding is greedy. Ratios are over the exact model, round by round: median and spread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
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

_PROMPT = 32
_numbers = count()


def run(driver: ClusterDriver, model: str, batch: int, tokens: int) -> float:
    """Return the seconds until all answers are complete."""
    prompts = torch.randint(3, 1000, (batch, _PROMPT), generator=torch.Generator().manual_seed(batch)).tolist()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [SequenceRequest(f"s{next(_numbers)}", "r", model, tuple(prompt), params) for prompt in prompts]
    begin = time.perf_counter()
    for _ in driver.run(requests):
        pass
    return time.perf_counter() - begin


def decode(driver: ClusterDriver, model: str, batch: int, tokens: int) -> float:
    """Return decoded tokens per second."""
    first = run(driver, model, batch, 1)
    return batch * (tokens - 1) / (run(driver, model, batch, tokens) - first)


def measure(drivers: dict[str, ClusterDriver], batch: int, tokens: int, pairs: int) -> dict[str, Any]:
    """Return the rates of all sides and their ratios over the first."""
    exact = next(iter(drivers))
    rates = [
        {side: decode(driver, side.partition(":")[0], batch, tokens) for side, driver in drivers.items()}
        for _ in range(pairs + 1)
    ][1:]  # the first round is a warm-up
    ratios = {side: spread([one[side] / one[exact] for one in rates]) for side in drivers if side != exact}
    return {
        "batch": batch,
        **{side: statistics.median(one[side] for one in rates) for side in drivers},
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding with quantised models beside the exact one.")
    parser.add_argument("store", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with Zoo(args.store, create=False) as zoo, ExitStack() as stack:
        drivers: dict[str, ClusterDriver] = {}
        for side in args.models:
            name, _, how = side.partition(":")
            config = EngineConfig(kv_cache_memory_bytes=64 << 20, quantized="decompress" if how else "native")
            drivers[side] = stack.enter_context(
                start_one_device(zoo, config, Chosen((name,), ()), prefix_caching="off", credit=4)
            )
        held = {side: driver.memory().weights for side, driver in drivers.items()}
        rows = [measure(drivers, batch, args.tokens, args.pairs) for batch in args.batch]
    document = {"threads": args.threads, "tokens": args.tokens, "pairs": args.pairs, "held": held, "rows": rows}
    deliver(document, args.output)


if __name__ == "__main__":
    main()
