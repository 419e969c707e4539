"""Reproduce Baton's tables and memory plot in small: one model, several batch sizes, four ways to fill a dense batch.

    python -m benchmarks.serving.baton [--table 1] [--table 2] [--batch 2 4 8] [--padding computed skipped]
        [--queries 30] [--rounds 1] [--threads 2] [--output FILE] [--plot FILE]

- Table 2: short prompts and short answers, run-to-completion against Baton.
- Table 1: long-in/short-out, short-in/long-out and short/short at 1:1:2, all four modes. At batch 4 every length is
  doubled, as in the paper.

All queries are there from the start. Answer lengths are fixed and decoding is greedy, so every mode computes the same
answers; the number of identical ones is reported, since modes may round differently. The model is a Llama of random
weights. Lengths are log-uniform: a short prompt has 4 to 32 tokens, a short answer 12 to 192 in table 2 and 4 to 26 in
table 1, where long is 160 to 176.

Rounds alternate the modes. Everything is run twice: all modes compute the padding in their windows, as in the paper, or
all skip it (`DenseConfig.padding`); finished rows keep running in either case. Reported with the seconds: the share of
idle computation (BA-18), how much of it was really computed, and peak memory; the plot shows memory over time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch

from cli.serving.models import Chosen
from cli.serving.one_device import start_one_device
from runtime.chains import Array, StageResult
from runtime.config import DenseConfig, DenseMode, DensePadding, EngineConfig
from runtime.engine.dense.executor import DenseEngine
from runtime.engine.dense.padding_stats import IdleCounts
from runtime.types import SamplingParams, SequenceRequest, StepPlan
from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from zoo.api import Zoo
from zoo.store import Store

MODES: tuple[DenseMode, ...] = ("run-to-completion", "pd", "baton", "baton-pd")
#: A Llama of 4 M parameters; a decode step takes milliseconds.
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
SHORT, LONG = (4, 26), (160, 176)


@dataclass(frozen=True, slots=True)
class Query:
    prompt: tuple[int, ...]
    answer: int


@dataclass
class BatonRun:
    """The result of one mode over all queries.

    Fields:
        cpu: CPU seconds, which other load on the machine affects little.
        idle: Counts of idle computation.
        tokens: Answers by query.
        trace: (seconds, pages in use, queries done, tokens generated) after each step.
    """

    seconds: float
    cpu: float
    idle: IdleCounts
    peak_pages: int
    tokens: dict[str, list[int]]
    trace: list[tuple[float, int, int, int]] = field(default_factory=list)


def short_queries(count: int, rng: random.Random) -> list[Query]:
    """Return the queries of table 2: short prompts and short answers of very different lengths."""
    return [_query(rng, (4, 32), (12, 192)) for _ in range(count)]


def mixed_queries(count: int, rng: random.Random, times: int) -> list[Query]:
    """Return the queries of table 1: long-in/short-out, short-in/long-out, short/short at 1:1:2, in random order.

    Every length is multiplied by `times`.
    """
    kinds = [(LONG, SHORT), (SHORT, LONG), (SHORT, SHORT), (SHORT, SHORT)]
    made = [_query(rng, *[(lo * times, hi * times) for lo, hi in kinds[i % 4]]) for i in range(count)]
    rng.shuffle(made)
    return made


def _query(rng: random.Random, given: tuple[int, int], wanted: tuple[int, int]) -> Query:
    """Return a query with log-uniform lengths: most are short, few are long."""
    lengths = [round(math.exp(rng.uniform(math.log(lo), math.log(hi)))) for lo, hi in (given, wanted)]
    return Query(tuple(rng.randrange(3, SHAPE["vocab_size"]) for _ in range(lengths[0])), lengths[1])


def run(
    zoo: Zoo, mode: DenseMode, slots: int, queries: Sequence[Query], kv_cache_memory_bytes: int, padding: DensePadding
) -> BatonRun:
    """Run all queries with one mode, from a cold start."""
    engines: list[DenseEngine] = []
    trace: list[tuple[float, int, int, int]] = []
    done = put_out = 0

    def watched(engine: DenseEngine) -> None:
        engines.append(engine)
        plain = engine.run

        def run(plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
            result = plain(plan, inputs)
            trace.append((time.perf_counter() - begin, engine.pages_used, done, put_out))
            return result

        engine.run = run  # type: ignore[method-assign]

    config = EngineConfig(kv_cache_memory_bytes=kv_cache_memory_bytes, dense=DenseConfig(mode, slots, padding=padding))
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(queries))}
    requests = [
        SequenceRequest(
            str(number),
            str(number),
            "model",
            query.prompt,
            SamplingParams(query.answer, ignore_eos=True),
            arrival=number,
        )
        for number, query in enumerate(queries)
    ]
    limits = dict(max_num_batched_tokens=1 << 20, max_num_seqs=len(queries))
    with start_one_device(
        zoo, config, Chosen(("model",), (), "dense"), prefix_caching="off", made=watched, **limits
    ) as driver:  # type: ignore[arg-type]
        begin, worked = time.perf_counter(), time.process_time()
        for event in driver.run(requests):
            done += event.finish is not None
            if event.token is not None:
                put_out += 1
                tokens[event.seq].append(event.token)
        engine = engines[0]
        return BatonRun(
            time.perf_counter() - begin, time.process_time() - worked, engine.idle, engine.peak_pages, tokens, trace
        )


def compare(
    zoo: Zoo,
    slots: int,
    queries: Sequence[Query],
    modes: Sequence[DenseMode],
    rounds: int,
    kv_bytes: int,
    padding: DensePadding,
) -> dict[str, Any]:
    """Run the modes in turn, `rounds` times.

    Ratios are per round, with median and spread, of wall-clock and of CPU seconds.
    """
    runs: dict[DenseMode, list[BatonRun]] = {mode: [] for mode in modes}
    for _ in range(rounds):
        for mode in modes:
            runs[mode].append(run(zoo, mode, slots, queries, kv_bytes, padding))
    first = runs[modes[0]][0]
    return {
        "batch": slots,
        "padding": padding,
        "queries": len(queries),
        "modes": {mode: _told(made, first) for mode, made in runs.items()},
        "over_run_to_completion": {mode: _ratios(runs["run-to-completion"], made) for mode, made in runs.items()},
        **({"baton_pd_over_baton": _ratios(runs["baton"], runs["baton-pd"])} if len(modes) == len(MODES) else {}),
        "trace": {mode: made[-1].trace for mode, made in runs.items()},
    }


def _told(made: Sequence[BatonRun], first: BatonRun) -> dict[str, Any]:
    last = made[-1]
    return {
        "seconds": [round(each.seconds, 2) for each in made],
        "cpu_seconds": [round(each.cpu, 2) for each in made],
        "places": asdict(last.idle),
        "idle_share": round(last.idle.idle / last.idle.shaped, 4),
        "computed_in_vain": round(last.idle.wasted / last.idle.computed, 4),
        "peak_pages": last.peak_pages,
        "same_answers": sum(last.tokens[seq] == first.tokens[seq] for seq in first.tokens),
    }


def _ratios(slow: Sequence[BatonRun], fast: Sequence[BatonRun]) -> dict[str, dict[str, float]]:
    pairs = list(zip(slow, fast, strict=True))
    return {
        "clock": _spread([a.seconds / b.seconds for a, b in pairs]),
        "cpu": _spread([a.cpu / b.cpu for a, b in pairs]),
    }


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(ratios), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3)}


def plot(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot memory over time, one panel per report (the paper's figure 8)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide = min(3, len(reports))
    deep = -(-len(reports) // wide)
    figure = Figure(figsize=(4.2 * wide, 3.2 * deep), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(deep, wide, squeeze=False)
    for axis in axes.flat[len(reports) :]:
        axis.set_visible(False)
    for axis, report in zip(axes.flat, reports, strict=False):
        for mode, trace in report["trace"].items():
            at, pages = [point[0] for point in trace], [point[1] for point in trace]
            axis.plot(at, pages, label=mode, linewidth=1.0, color=f"C{MODES.index(mode)}")
        axis.set_title(
            f"table {report['table']}, batch {report['batch']}, padding {report['padding']}", fontsize="small"
        )
        axis.set_xlabel("seconds")
    for row in axes:
        row[0].set_ylabel("pages in use, padding included")
    axes.flat[len(reports) - 1].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--table", type=int, choices=[1, 2], action="append")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[2, 4, 8, 10], help="batch sizes of table 2; table 1 has 4 and 8"
    )
    parser.add_argument("--padding", choices=get_args(DensePadding), nargs="+", default=list(get_args(DensePadding)))
    parser.add_argument("--queries", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reports = []
    with tempfile.TemporaryDirectory() as scratch, Zoo(Path(scratch) / "store") as zoo:
        _make(zoo.store, Path(scratch) / "hf")
        run(zoo, "baton-pd", 2, short_queries(2, random.Random(0)), 64 << 20, "skipped")  # warm-up
        for table, padding in itertools.product(args.table or [2, 1], args.padding):
            for slots in args.batch if table == 2 else [4, 8]:
                rng = random.Random(table)
                queries = (
                    short_queries(args.queries, rng)
                    if table == 2
                    else mixed_queries(args.queries, rng, 2 if slots == 4 else 1)
                )
                modes: Sequence[DenseMode] = ("run-to-completion", "baton", "baton-pd") if table == 2 else MODES
                report = {"table": table, **compare(zoo, slots, queries, modes, args.rounds, 512 << 20, padding)}
                reports.append(report)
                _say(report)
    document = {
        "benchmark": "baton",
        "shape": SHAPE,
        "threads": args.threads,
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "reports": [{key: value for key, value in report.items() if key != "trace"} for report in reports],
    }
    if args.plot:
        plot(reports, args.plot)
    if args.output:
        args.output.write_text(json.dumps(document, indent=2) + "\n")


def _make(store: Store, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    ingest(store, open_source(str(folder)), name="model")


def _say(report: dict[str, Any]) -> None:
    print(f"table {report['table']}, batch {report['batch']}, {report['queries']} queries, padding {report['padding']}")
    for mode, told in report["modes"].items():
        ratio = report["over_run_to_completion"][mode]
        print(
            f"  {mode:18} {told['seconds'][-1]:7.2f} s {ratio['clock']['median']:5.2f} x   "
            f"cpu {told['cpu_seconds'][-1]:7.2f} s {ratio['cpu']['median']:5.2f} x   idle "
            f"{100 * told['idle_share']:5.1f} %, "
            f"computed in vain {100 * told['computed_in_vain']:5.1f} %  "
            f"peak {told['peak_pages']:6} pages  same answers {told['same_answers']}/{report['queries']}"
        )
    if "baton_pd_over_baton" in report:
        ratio = report["baton_pd_over_baton"]
        print(f"  baton-pd over baton: {ratio['clock']['median']:.2f} x, cpu {ratio['cpu']['median']:.2f} x")


if __name__ == "__main__":
    main()
