"""The quick benchmark: a family of random Llamas under one workload, Block Zoo against transformers.

    python -m benchmarks.quick [--requests 32] [--rounds 2] [--threads 2] [--output FILE] [--plot FILE]

It takes under five minutes on two cores. One store has a foundation of 32 M parameters, three full fine-tunes that
differ in one layer, and four LoRAs. Popularity is skewed; prompts have a median of 32 tokens, answers have 32; Poisson
arrivals come faster than either side answers.

transformers loads each model from the same store on demand: once with room for one model (per-model provisioning), once
with room for all. Rounds alternate; ratios are ours over theirs, with their spread. Nothing fails for being slow. The
same comparison by hand: `zoo bench --against transformers`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.serving.shared_family import make_family
from cli.bench.plot import plot_bench
from cli.bench.report import show
from cli.bench.rounds import BenchmarkRun, run_bench
from cli.bench.targets import Access, EngineTarget
from cli.serving.options import ServeOptions
from cli.shared.progress import hush
from runtime.bench.arrivals import Arrivals
from runtime.bench.lengths import parse_lengths
from runtime.bench.summary import Slo
from runtime.bench.workload import WorkloadSettings
from zoo.api import Zoo

_FULL, _LORAS = 3, 4


def fill(folder: Path) -> Path:
    """Make a store with the family."""
    made = {
        **make_family(folder, "full", _FULL + 1, "32m", "float32"),
        **make_family(folder, "lora", _LORAS, "32m", "float32"),
    }
    with Zoo(folder / "store") as zoo:
        for name, path in made.items():
            zoo.ingest(path, name, None if name == "base" else "base")
    return folder / "store"


def measure(store: Path, resident: int, requests: int, rounds: int) -> dict[str, Any]:
    """Return one report. `resident` is how many models transformers may keep in memory."""
    settings = WorkloadSettings(
        requests,
        seed=0,
        arrivals=Arrivals(20.0),
        prompts=parse_lengths("lognormal:32,0.5<=128"),
        answers=parse_lengths("32"),
        popularity="skewed",
    )
    inside = EngineTarget(store, None, ServeOptions(kv_cache_memory_bytes=256 << 20), resident=resident)
    return run_bench(
        BenchmarkRun(("zoo", "transformers"), (), settings, None, None, Slo(), rounds, 1, Access(), inside), silent=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hush()
    begin = time.perf_counter()
    reports: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        store = fill(Path(scratch))
        for what, resident in (("one model in memory", 1), ("all models in memory", 1 + _FULL + _LORAS)):
            reports[what] = measure(store, resident, args.requests, args.rounds)
            print(f"\ntransformers with {what}:\n")
            show(reports[what])
    print(f"\n{time.perf_counter() - begin:.0f} s in all")
    if args.output:
        args.output.write_text(json.dumps({"benchmark": "quick", "reports": reports}, indent=1) + "\n")
    if args.plot:
        plot_bench(reports["one model in memory"], args.plot)


if __name__ == "__main__":
    main()
