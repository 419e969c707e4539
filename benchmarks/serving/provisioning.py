"""Serve twenty models under one Poisson trace: one engine for all, an engine per model, and vLLM with LoRA.

    python -m benchmarks.serving.provisioning transformers|vllm|loras|rows [--vllm PYTHON] [--rate 100]
        [--requests 400] [--popularity uniform] [--rounds 2] [--models DIR] [--threads N] [--output FILE]

The family is that of `twenty`; with `--models`, the demo's trained models replace those of the same names. Float32;
prompts and answers of varied lengths within the demo's context; greedy, with fixed answer lengths. Parts:

- `transformers`: per-model provisioning, one model in memory, loaded from the same store on demand (`zoo bench`), in
  turns with ours.
- `vllm`: the same with vLLM. An engine takes half a minute to start, so the run is composed: starts are measured, every
  batch runs on an engine of the model's shape, and `swapped` adds the times. Also with batches as large as vLLM takes,
  and with swaps that take no time.
- `loras`: the requests for the narrow foundation and its LoRAs, ours and one vLLM with all adapters, in turns.
- `rows`: decode tokens per second of 32 rows over 8 LoRAs and of 32 rows of the base, in turns; ours and vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports import deliver
from benchmarks.serving.peers import Side, launch, prompts_of
from benchmarks.serving.shared_family import make_family, spread
from benchmarks.serving.swapped import answered, provision
from benchmarks.serving.twenty import RANK, by_popularity, fill, make, members
from cli.bench.where import where
from cli.demo.recipe import SMALL
from cli.shared.progress import hush
from runtime.bench.answers import Answer
from runtime.bench.arrivals import Arrivals
from runtime.bench.lengths import parse_lengths
from runtime.bench.summary import Slo, ratios, summarize
from runtime.bench.workload import WorkloadRequest, WorkloadSettings, build
from zoo.api import Zoo

_BASE = SMALL.members[0].name
#: Batch sizes of an engine per model: the default, and as many as vLLM takes here.
_BATCH, _ALL = 16, 256
_PROMPTS, _ANSWERS = "lognormal:96,0.7<=320", "lognormal:48,0.7<=192"
_ROWS, _LORAS, _PROMPT, _TOKENS = 32, 8, 32, 128


@dataclass(frozen=True)
class Family:
    """The models on disk and in a store, and the workload."""

    names: list[str]
    folders: dict[str, Path]
    store: Path
    settings: WorkloadSettings

    @property
    def asks(self) -> tuple[WorkloadRequest, ...]:
        return build(self.settings, self.names).asks


def prepare(args: argparse.Namespace, folder: Path) -> Family:
    kin = members()
    folders = make(folder / "models", kin, args.models)
    fill(folder / "store", kin, folders)
    settings = WorkloadSettings(
        args.requests,
        args.seed,
        Arrivals(args.rate),
        None,
        parse_lengths(_PROMPTS),
        parse_lengths(_ANSWERS),
        args.popularity,
        vocabulary=SMALL.vocabulary,
        longest=SMALL.context,
    )
    return Family(by_popularity(kin, args.seed), folders, folder / "store", settings)


def beside_transformers(args: argparse.Namespace, family: Family) -> dict[str, Any]:
    """Run `zoo bench` with either engine in turn.

    Each round is a process of its own: two engines in one process would compete for its threads.
    """
    rounds: list[dict[str, dict[str, Any]]] = []
    memory: dict[str, Any] = {}
    for number in range(args.rounds):
        found: dict[str, dict[str, Any]] = {}
        for engine in ("zoo", "transformers") if number % 2 == 0 else ("transformers", "zoo"):
            document = _bench(engine, args, family)
            found[engine], memory[engine] = document["runs"][0], document["targets"][0]["memory"]
            print(
                engine,
                json.dumps({name: found[engine][name] for name in ("tokens_per_second", "e2e")}),
                file=sys.stderr,
            )
        rounds.append(found)
    return {"rounds": rounds, "memory": memory, "ratios": ratios([(one["zoo"], one["transformers"]) for one in rounds])}


def _bench(engine: str, args: argparse.Namespace, family: Family) -> dict[str, Any]:
    """Return the document of one round."""
    settings = family.settings
    options = {
        "engine": engine,
        "store": family.store,
        "requests": args.requests,
        "rate": args.rate,
        "prompt-tokens": _PROMPTS,
        "answer-tokens": _ANSWERS,
        "popularity": args.popularity,
        "vocabulary": settings.vocabulary,
        "max-model-len": settings.longest,
        "seed": args.seed,
        "batch": _BATCH,
        "resident": 1,
        "kv-cache-memory-bytes": "1GiB",
    }
    chosen = [f"--{name}={value}" for name, value in options.items()] + [f"--models={name}" for name in family.names]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": str(args.threads)}
    command = [sys.executable, "-c", "from cli.app import main; main()", "bench", *chosen, "--json"]
    made = subprocess.run(command, env=env, capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"zoo bench --engine {engine} ended with {made.returncode}: {made.stderr[-2000:]}")
    document: dict[str, Any] = json.loads(made.stdout)
    return document


def beside_vllm(args: argparse.Namespace, family: Family) -> dict[str, Any]:
    """Run ours directly and compose vLLM's engine per model from measured parts. Ratios are within a round."""
    ours = launch("zoo", [str(family.store), *family.names], args.threads)
    imports = _seconds(
        lambda: subprocess.run([str(args.vllm), "-c", "from vllm import LLM"], check=True, capture_output=True)
    )
    with Zoo(family.store) as zoo:
        shape = {name: zoo.model(name).base or name for name in family.names}
    starts: dict[str, list[float]] = {}
    engines: dict[str, Side] = {}
    for _ in range(args.starts):  # later starts find what the first one compiled
        for base in dict.fromkeys(shape.values()):
            if base in engines:
                engines.pop(base).close()
            engines[base] = launch(
                "vllm", [str(family.folders[base])], args.threads, args.vllm, *(["--eager"] * args.eager)
            )
            starts.setdefault(base, []).append(engines[base].first_token - imports)
    best = {base: min(seconds) for base, seconds in starts.items()}

    def run(model: str, batch: Sequence[WorkloadRequest]) -> list[float]:
        return list(_asked(engines[shape[model]], batch, at_once=True, named=False))

    variants: dict[str, tuple[Callable[[str], float], int]] = {
        "batches of 16": (lambda model: best[shape[model]], _BATCH),
        "all that wait": (lambda model: best[shape[model]], _ALL),
        "all that wait, swaps free": (lambda _: 0.0, _ALL),
    }
    asks = family.asks
    rounds: list[dict[str, dict[str, Any]]] = []
    _asked(ours, asks[: len(asks) // 4], at_once=True)
    for _ in range(args.rounds):
        mine = summary(answered(asks, _asked(ours, asks)))
        found = {"zoo": mine}
        for what, (swap, most) in variants.items():
            provisioned = provision(asks, swap, run, most)
            found[what] = {**summary(provisioned.answers), "swaps": provisioned.swaps, "ran": provisioned.ran}
        rounds.append(found)
    for side in (ours, *engines.values()):
        side.close()
    compared = {what: ratios([(one["zoo"], one[what]) for one in rounds]) for what in variants}
    return {"imports": imports, "starts": starts, "eager": args.eager, "rounds": rounds, "ratios": compared}


def beside_shared(args: argparse.Namespace, family: Family) -> dict[str, Any]:
    """Run one foundation and its LoRAs, all in one engine on both sides."""
    with Zoo(family.store) as zoo:
        loras = [name for name in family.names if zoo.model(name).kind == "lora" and zoo.model(name).base == _BASE]
    asks = [ask for ask in family.asks if ask.model == _BASE or ask.model in loras]
    sides = [
        launch("zoo", [str(family.store), _BASE, *loras], args.threads),
        _vllm_with(args, family.folders[_BASE], loras, family.folders),
    ]
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(args.rounds + 1):  # the first round is a warm-up
        order = sides if number % 2 == 0 else sides[::-1]
        rounds.append({side.name: summary(answered(asks, _asked(side, asks))) for side in order})
    for side in sides:
        side.close()
    return {
        "requests": len(asks),
        "rounds": rounds[1:],
        "ratios": ratios([(one["zoo"], one["vllm"]) for one in rounds[1:]]),
    }


def beside_none(args: argparse.Namespace, family: Family, folder: Path) -> dict[str, Any]:
    """Compare rows with adapters and rows without.

    The models have the demo's shape (adapters on the attention) and that of the 32 M Llama of `peers` (on q and v).
    """
    with Zoo(family.store) as zoo:
        narrow = [name for name in family.names if zoo.model(name).kind == "lora" and zoo.model(name).base == _BASE][
            :_LORAS
        ]
    big = make_family(folder / "32m", "lora", _LORAS, "32m", "float32")
    with Zoo(folder / "32m-store") as zoo:
        for name, path in big.items():
            zoo.ingest(path, name, None if name == "base" else "base")
    rows: list[dict[str, Any]] = []
    for what, store, base, loras, folders in (
        ("small", family.store, _BASE, narrow, family.folders),
        ("32m", folder / "32m-store", "base", [name for name in big if name != "base"], big),
    ):
        sides = [launch("zoo", [str(store), base, *loras], args.threads)]
        if args.vllm:
            sides.append(_vllm_with(args, folders[base], loras, folders))
        for side in sides:
            rows.append({"model": what, "side": side.name, **_rows(side, base, loras, args.rounds)})
            print(json.dumps(rows[-1]), file=sys.stderr)
            side.close()
    return {"rows": _ROWS, "loras": _LORAS, "found": rows}


def _rows(side: Side, base: str, loras: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return decode tokens per second without and with adapters, in turns."""
    found: dict[str, list[float]] = {"without": [], "with": []}
    models = {"without": [base] * _ROWS, "with": [loras[row % len(loras)] for row in range(_ROWS)]}
    for number in range(rounds + 1):  # the first round is a warm-up
        prompts = prompts_of(_ROWS, _PROMPT, number, SMALL.vocabulary)
        for what in ("without", "with") if number % 2 == 0 else ("with", "without"):
            first = side.answer_prompts(prompts, 1, models[what])["seconds"]
            whole = side.answer_prompts(prompts, _TOKENS, models[what])["seconds"]
            found[what].append(_ROWS * (_TOKENS - 1) / (whole - first))
    shares = [a / b for a, b in zip(found["with"][1:], found["without"][1:], strict=True)]
    return {what: spread(rates[1:]) for what, rates in found.items()} | {"share": spread(shares)}


def _vllm_with(args: argparse.Namespace, base: Path, loras: Sequence[str], folders: Mapping[str, Path]) -> Side:
    ranks = [json.loads((folders[name] / "adapter_config.json").read_text())["r"] for name in loras]
    adapters = [f"{name}={folders[name]}" for name in loras]
    options = ["--rank", str(max(RANK, *ranks)), *(["--eager"] * args.eager)]
    return launch("vllm", [str(base), *adapters], args.threads, args.vllm, *options)


def _asked(side: Side, asks: Sequence[WorkloadRequest], at_once: bool = False, named: bool = True) -> list[float]:
    """Return when each request was answered, in seconds from the start."""
    prompts = [list(ask.prompt) for ask in asks if not isinstance(ask.prompt, str)]
    models = [ask.model for ask in asks] if named else None
    ended: list[float] = side.answer_prompts(
        prompts, [ask.answer for ask in asks], models, None if at_once else [ask.at for ask in asks]
    )["ended"]
    return ended


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the summary of answers of which only the ends are known."""
    return {**summarize(answers, Slo()), "ttft": None, "tpot": None, "itl": None}


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Twenty models under one trace: one engine beside an engine per model, and vLLM with LoRA."
    )
    parser.add_argument("part", choices=("transformers", "vllm", "loras", "rows"))
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM")
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--popularity", choices=("uniform", "skewed"), default="uniform")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--starts", type=int, default=2, help="vllm: engines per shape; the fastest start counts")
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation")
    parser.add_argument("--models", type=Path, help="the demo's models folder")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.vllm is None and args.part in ("vllm", "loras"):
        parser.error(f"{args.part} needs --vllm")
    torch.set_num_threads(args.threads)
    hush()
    with tempfile.TemporaryDirectory() as scratch:
        family = prepare(args, Path(scratch))
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "transformers": lambda: beside_transformers(args, family),
            "vllm": lambda: beside_vllm(args, family),
            "loras": lambda: beside_shared(args, family),
            "rows": lambda: beside_none(args, family, Path(scratch)),
        }
        begin = time.perf_counter()
        found = parts[args.part]()
        document = {
            "benchmark": "provisioning",
            "part": args.part,
            "models": len(family.names),
            "trained": args.models is not None,
            "threads": args.threads,
            "workload": asdict(family.settings),
            "where": where("cpu", inside=True),
            "seconds": time.perf_counter() - begin,
            "found": found,
        }
    deliver(document, args.output)


if __name__ == "__main__":
    main()
