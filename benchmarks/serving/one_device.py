"""Measure one device by decode credit: how many tokens its agent may decode before it reports to the scheduler.

    python -m benchmarks.serving.one_device [--size 32m|tiny] [--batch 1 4 16 64] [--credits 1 4] [--tokens 128]
        [--prompt 32] [--pairs 5] [--threads N] [--output FILE]

The model is a random Llama in float32; answers are greedy and of equal length; there is no text and no HTTP. Each
credit has its own process, and they take turns round by round.

- `ratio`: tokens per second over those of the first credit in the same round, median and spread.
- `first_ms`: milliseconds to a request's first token.
- `cpu_us`: CPU microseconds per token.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports import deliver
from benchmarks.serving.peers import Side
from benchmarks.serving.shared_family import SHAPES, spread
from cli.bench.where import where
from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from zoo.store import Store

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model(folder: Path, size: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = SHAPES["32m"] if size == "32m" else {**SHAPES["32m"], **_TINY}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)


def compared(sides: dict[str, Side], batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run the sides in turn. The first round is a warm-up."""
    found: list[dict[str, dict[str, Any]]] = []
    for seed in range(args.pairs + 1):
        order = {
            "clients": batch,
            "requests": batch * max(1, args.waves // batch),
            "prompt": args.prompt,
            "tokens": args.tokens,
            "seed": seed,
        }
        names = list(sides) if seed % 2 else list(sides)[::-1]
        found.append({name: sides[name].order(order) for name in names})
    found = found[1:]

    def middle(name: str, of: str) -> float:
        return statistics.median(pair[name][of] / pair[name]["tokens"] for pair in found)

    first = next(iter(sides))
    return {
        "ratio": {name: spread([pair[first]["seconds"] / pair[name]["seconds"] for pair in found]) for name in sides},
        "tokens_per_second": {name: round(1 / middle(name, "seconds"), 1) for name in sides},
        "cpu_us": {name: round(1e6 * middle(name, "cpu"), 1) for name in sides},
        "first_ms": {
            name: round(1000 * statistics.median(one for pair in found for one in pair[name]["first"]), 2)
            for name in sides
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="One device by decode credit.")
    parser.add_argument("--size", choices=("32m", "tiny"), default="32m")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--credits", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--waves", type=int, default=4, help="requests of a run that come in waves of a batch")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    env = {"OMP_NUM_THREADS": str(args.threads)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model", args.size)
        with Store.open(folder / "store") as store:
            ingest(store, open_source(str(folder / "model")), name="model")
        command = [
            sys.executable,
            "-m",
            "benchmarks.serving.asking",
            "inside",
            str(folder / "store"),
            "model",
            "--threads",
            str(args.threads),
        ]
        sides = {str(credit): Side(str(credit), [*command, "--credit", str(credit)], env) for credit in args.credits}
        batches = {}
        for batch in args.batch:
            batches[str(batch)] = compared(sides, batch, args)
            print(batch, batches[str(batch)], flush=True)
        for side in sides.values():
            side.close()
    deliver(
        {
            "benchmark": "one_device",
            "size": args.size,
            "threads": args.threads,
            "where": where("cpu", inside=True),
            "batches": batches,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
