"""Compare the speed of two checkouts of this repository, by turns on one machine.

    python -m benchmarks.before_after OLD NEW [--what engine family http hops scheduling] [--size 32m]
        [--model FOLDER] [--dtype float32|bfloat16] [--set VARIABLE=VALUE]… [--batch 1 4 16 64] [--rounds 5]
        [--threads N] [--output FILE]

- `engine`: tokens per second of one model, decoding at each batch size, and of prompts (as `benchmarks.serving.peers`).
- `family`: the same of eight models of one family that share all but their last layer, two requests each.
- `http`: tokens per second through `zoo serve` at each batch size.
- `hops`, `scheduling`: microseconds as `benchmarks.cluster.hops` and `benchmarks.cluster.scheduling` print them.

`--model` and `--dtype` are for `engine`: a checkpoint, and the data type. `--set` sets an environment variable of NEW
only, so that OLD and NEW may be one checkout.

Both checkouts run in turn in every round; the one that starts changes from round to round. A ratio is new over old of
one round (for times: old over new), so that above 1 is faster; printed are the median and the spread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports import deliver
from benchmarks.serving.peers import Side, decode, prefill, prompts_of
from benchmarks.serving.shared_family import SHAPES, spread
from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from zoo.store import Store

#: Models of the family, and requests of each.
_MODELS, _REQUESTS = 8, 2
#: A measurement of one checkout: values by name, larger is better.
Values = Mapping[str, float]


class Checkout:
    """One of the two checkouts. Programs run with it as their PYTHONPATH."""

    def __init__(self, root: Path, threads: int, env: Mapping[str, str] | None = None) -> None:
        self.root = root.resolve()
        self.env = {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **(env or {})}

    def module(self, name: str) -> str:
        """Return the path of a benchmark's file, wherever this checkout has it: of several, that of `serving`."""
        found = sorted(self.root.glob(f"benchmarks/**/{name}.py"))
        if not found:
            raise FileNotFoundError(f"{self.root} has no benchmark {name}")
        return str(next((each for each in found if each.parent.name == "serving"), found[0]))

    def side(self, store: Path, models: Sequence[str], threads: int, dtype: str = "float32") -> Side:
        """Start its engine on some models of a store."""
        options = ["--threads", str(threads), "--dtype", dtype]
        command = [sys.executable, self.module("sides"), "zoo", str(store), *models, *options]
        return Side(str(self.root), command, self.env)

    def run(self, name: str, *arguments: str) -> Any:
        """Run a benchmark and return its report."""
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            dotted = str(Path(self.module(name)).relative_to(self.root)).removesuffix(".py").replace("/", ".")
            command = [sys.executable, "-m", dotted, *arguments, "--output", report.name]
            subprocess.run(command, check=True, env={**os.environ, **self.env}, capture_output=True, cwd=self.root)
            return json.loads(Path(report.name).read_text())


class ServedCheckout:
    """`zoo serve` of a checkout, with its defaults."""

    def __init__(self, checkout: Checkout, store: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        zoo = [sys.executable, "-c", "from cli.app import main; main()"]
        command = [*zoo, "serve", "--store", str(store), "--port", str(port)]
        env = {**os.environ, **checkout.env}
        self._process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                urllib.request.urlopen(self.url + "/health", timeout=1)  # noqa: S310
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"zoo serve of {checkout.root} does not answer")

    def rate(self, batch: int, tokens: int, seed: int) -> float:
        """Return tokens per second of one request with `batch` prompts."""
        body = {
            "model": "model-0", "prompt": prompts_of(batch, 32, seed), "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        request = urllib.request.Request(  # noqa: S310
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
            answer.read()
        return batch * tokens / (time.perf_counter() - begin)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)


def by_turns(measures: Sequence[Callable[[int], Values]], rounds: int) -> dict[str, Any]:
    """Run both measurements in every round; the first round is a warm-up. Returns ratios of the second to the first."""
    found: list[tuple[Values, Values]] = []
    for seed in range(rounds + 1):
        order = (0, 1) if seed % 2 == 0 else (1, 0)
        made = {which: measures[which](seed) for which in order}
        found.append((made[0], made[1]))
        print(json.dumps({"round": seed, "old": found[-1][0], "new": found[-1][1]}), file=sys.stderr, flush=True)
    return {name: spread([new[name] / old[name] for old, new in found[1:]]) for name in found[0][0]}


def engine(checkouts: Sequence[Checkout], store: Path, args: argparse.Namespace) -> dict[str, Any]:
    sides = [each.side(store, ["model-0"], args.threads, args.dtype) for each in checkouts]

    def measure(side: Side, seed: int) -> Values:
        rates = {f"decode {batch}": decode(side, batch, args.tokens, seed)["rate"] for batch in args.batch}
        return {**rates, "prompts": prefill(side, seed)["rate"]}

    try:
        return by_turns([partial(measure, side) for side in sides], args.rounds)
    finally:
        for side in sides:
            side.close()


def family(checkouts: Sequence[Checkout], store: Path, args: argparse.Namespace) -> dict[str, Any]:
    names = [f"model-{number}" for number in range(_MODELS)]
    sides = [each.side(store, names, args.threads) for each in checkouts]

    def measure(side: Side, seed: int) -> Values:
        prompts, models = prompts_of(_MODELS * _REQUESTS, 32, seed), names * _REQUESTS
        first = side.answer_prompts(prompts, 1, models)["seconds"]
        whole = side.answer_prompts(prompts, args.tokens, models)["seconds"]
        return {f"decode {len(prompts)}": len(prompts) * (args.tokens - 1) / (whole - first)}

    try:
        return by_turns([partial(measure, side) for side in sides], args.rounds)
    finally:
        for side in sides:
            side.close()


def http(checkouts: Sequence[Checkout], store: Path, args: argparse.Namespace) -> dict[str, Any]:
    servers = [ServedCheckout(each, store, 18080 + at) for at, each in enumerate(checkouts)]

    def measure(server: ServedCheckout, seed: int) -> Values:
        return {f"batch {batch}": server.rate(batch, args.tokens, seed) for batch in args.batch}

    try:
        return by_turns([partial(measure, server) for server in servers], args.rounds)
    finally:
        for server in servers:
            server.close()


def hops(checkouts: Sequence[Checkout], store: Path, args: argparse.Namespace) -> dict[str, Any]:
    def measure(checkout: Checkout, seed: int) -> Values:
        step = checkout.run("hops")["step"]
        return {name: 1 / value["p50_ms"] for name, value in step.items()}

    return by_turns([partial(measure, each) for each in checkouts], args.rounds)


def scheduling(checkouts: Sequence[Checkout], store: Path, args: argparse.Namespace) -> dict[str, Any]:
    def measure(checkout: Checkout, seed: int) -> Values:
        report = checkout.run("scheduling")
        agent = report.get("agent_us") or report["relay_us"]
        return {"scheduler": 1 / report["scheduler_us"]["median"], "agent": 1 / agent["median"]}

    return by_turns([partial(measure, each) for each in checkouts], args.rounds)


WHAT = {"engine": engine, "family": family, "http": http, "hops": hops, "scheduling": scheduling}


def prepare(folder: Path, size: str) -> Path:
    """Make a store with a family of random models that differ in their last layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[size]))
    with Store.open(folder / "store") as store:
        for number in range(_MODELS):
            for value in model.model.layers[-1].parameters():
                torch.nn.init.normal_(value, std=0.02)
            model.save_pretrained(folder / f"model-{number}")
            ingest(store, open_source(str(folder / f"model-{number}")), name=f"model-{number}")
    return folder / "store"


def store_model(folder: Path, model: Path) -> Path:
    """Make a store with one checkpoint."""
    with Store.open(folder / "store") as store:
        ingest(store, open_source(str(model)), name="model-0")
    return folder / "store"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--what", nargs="+", choices=tuple(WHAT), default=list(WHAT))
    parser.add_argument("--size", choices=tuple(SHAPES), default="32m")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of random weights, for engine")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--set", action="append", default=[], metavar="VARIABLE=VALUE")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.model and args.what != ["engine"]:
        parser.error("--model needs --what engine")
    env = dict(one.split("=", 1) for one in args.set)
    checkouts = [Checkout(args.old, args.threads), Checkout(args.new, args.threads, env)]
    with tempfile.TemporaryDirectory() as scratch:
        store = store_model(Path(scratch), args.model) if args.model else prepare(Path(scratch), args.size)
        found = {what: WHAT[what](checkouts, store, args) for what in args.what}
    for what, ratios in found.items():
        for name, ratio in ratios.items():
            print(f"{what:<10} {name:<10} {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})")
    deliver({"benchmark": "before_after", "rounds": args.rounds, "ratios": found}, args.output)


if __name__ == "__main__":
    main()
