"""Compare decoding with plain weights, weights in oneDNN's layout, and the project's own kernels, in one process.

    python -m benchmarks.serving.packed_weights [--size 32m] [--dtype float32|bfloat16] [--batch 1 4 16 64]
        [--threads N] [--pairs 3]

Reported are tokens per second after each answer's first token: the time of a run less that of a run for one token.
Weights are random, prompts have 32 tokens, decoding is greedy, and the engines take turns. Ratios are over plain, round
by round: median and spread. Also reported is whether oneDNN's layout would be chosen on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports import deliver
from benchmarks.serving.shared_family import SHAPES, spread
from cli.serving.models import Chosen
from cli.serving.one_device import start_one_device
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import EngineConfig
from runtime.engine.layers.matmul import OneDnn
from runtime.engine.layers.packed_weights import faster
from runtime.types import SamplingParams, SequenceRequest
from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from zoo.api import Zoo

_PROMPT = 32
_numbers = count()


def run(driver: ClusterDriver, batch: int, tokens: int) -> float:
    """Return the seconds until all answers are complete."""
    prompts = torch.randint(3, 1000, (batch, _PROMPT), generator=torch.Generator().manual_seed(batch)).tolist()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [SequenceRequest(f"s{next(_numbers)}", "r", "model", tuple(prompt), params) for prompt in prompts]
    begin = time.perf_counter()
    for _ in driver.run(requests):
        pass
    return time.perf_counter() - begin


def decode(driver: ClusterDriver, batch: int, tokens: int) -> float:
    """Return decoded tokens per second."""
    first = run(driver, batch, 1)
    return batch * (tokens - 1) / (run(driver, batch, tokens) - first)


def measure(drivers: dict[str, ClusterDriver], batch: int, tokens: int, pairs: int) -> dict[str, Any]:
    rates: list[dict[str, float]] = []
    for _ in range(pairs + 1):
        rates.append({name: decode(driver, batch, tokens) for name, driver in drivers.items()})
    rates = rates[1:]  # the first round is a warm-up
    ratios = {name: spread([one[name] / one["plain"] for one in rates]) for name in drivers if name != "plain"}
    return {
        "batch": batch,
        **{name: statistics.median(one[name] for one in rates) for name in drivers},
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding with plain and packed weights, and with kernels.")
    parser.add_argument("--size", choices=tuple(SHAPES), default="32m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[args.dtype]
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPES[args.size])).to(dtype).save_pretrained(Path(scratch) / "model")
        with Zoo(Path(scratch) / "store") as zoo, ExitStack() as stack:
            ingest(zoo.store, open_source(str(Path(scratch) / "model")), name="model")
            how = {"plain": ("stock", "plain"), "packed": ("stock", "packed"), "kernels": ("auto", "auto")}
            configs = {
                name: EngineConfig(kv_cache_memory_bytes=1 << 29, kernels=k, weights=w) for name, (k, w) in how.items()
            }  # type: ignore[arg-type]
            chosen = Chosen(("model",), ())
            drivers = {
                name: stack.enter_context(start_one_device(zoo, each, chosen, prefix_caching="off"))
                for name, each in configs.items()
            }
            report = {
                "benchmark": "packed_weights",
                "size": args.size,
                "dtype": args.dtype,
                "threads": args.threads,
                "torch": version("torch"),
                "resident": {name: driver.memory().weights for name, driver in drivers.items()},
                "onednn_is_faster": faster(OneDnn(), dtype, args.threads),
                "batches": [measure(drivers, batch, args.tokens, args.pairs) for batch in args.batch],
            }
    deliver(report, args.output)


if __name__ == "__main__":
    main()
