"""Time skinny matrix products on this CPU: `F.linear`, `W @ X.T`, and in float32 the project's kernels, by rows.

    python -m benchmarks.serving.skinny [--threads N] [--output FILE]

These figures determine the limits in `runtime/engine/layers/linear.py`. The kernels use the weights as they are stored.
All linear layers of a decode step run one after the other, so that weights come from the same cache level or memory as
in a step. Reported are best and median of several rounds in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.reports import deliver
from benchmarks.serving.shared_family import SHAPES
from runtime.config import EngineConfig
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.models.registry import kernels_for

ROWS = (1, 2, 4, 8, 12, 16, 32, 48, 64, 96)


def weights(shape: dict[str, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the weights of all linear layers of a model of this shape, in order."""
    hidden, wide, kv = (
        shape["hidden_size"],
        shape["intermediate_size"],
        shape["hidden_size"] * shape["num_key_value_heads"],
    )
    kv //= shape["num_attention_heads"]
    layer = [
        (hidden, hidden),
        (kv, hidden),
        (kv, hidden),
        (hidden, hidden),
        (wide, hidden),
        (wide, hidden),
        (hidden, wide),
    ]
    sizes = [*(layer * shape["num_hidden_layers"]), (shape["vocab_size"], hidden)]
    return [(torch.randn(out, into) * 0.02).to(dtype) for out, into in sizes]


def timed(run: Callable[[], object], rounds: int = 8) -> dict[str, float]:
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return {"best_ms": 1e3 * min(seconds), "median_ms": 1e3 * statistics.median(seconds)}


def measure(size: str, dtype: torch.dtype, kernels: Kernels | None) -> list[dict[str, Any]]:
    matrices = weights(SHAPES[size], dtype)
    rows = []
    for count in ROWS:
        inputs = {matrix.shape[1]: torch.randn(count, matrix.shape[1]).to(dtype) for matrix in matrices}
        plain = timed(lambda inputs=inputs: [F.linear(inputs[w.shape[1]], w) for w in matrices])
        turned = timed(lambda inputs=inputs: [torch.mm(w, inputs[w.shape[1]].t()).t() for w in matrices])
        row = {"rows": count, "linear": plain, "turned": turned, "ratio": plain["median_ms"] / turned["median_ms"]}
        if kernels is not None and dtype == torch.float32:
            row["stored"] = timed(lambda inputs=inputs: [kernels.stored(inputs[w.shape[1]], w, None) for w in matrices])
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Skinny products on this CPU.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = kernels_for(EngineConfig(kv_cache_memory_bytes=1))
    products = {
        f"{size} {name}": measure(size, getattr(torch, name), kernels)
        for size in SHAPES
        for name in ("float32", "bfloat16")
    }
    report = {"benchmark": "skinny", "threads": args.threads, "torch": version("torch"), "products": products}
    deliver(report, args.output)


if __name__ == "__main__":
    main()
