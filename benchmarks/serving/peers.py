"""Compare Block Zoo with vLLM, OpenVINO and transformers on one model on a CPU; each has all cores in its turn.

    python -m benchmarks.serving.peers [--vllm PYTHON] [--openvino PYTHON --exported FOLDER] [--size 32m]
        [--model FOLDER] [--dtype float32|bfloat16] [--batch 1 4 16 64] [--pairs 3] [--threads N] [--eager]
        [--no-transformers] [--output FILE]

`--vllm` is the Python of an environment with vLLM for CPU, `--openvino` that of one with OpenVINO GenAI, and
`--exported` the model as OpenVINO reads it (`optimum-cli export openvino --model MODEL --task
text-generation-with-past --weight-format fp32 FOLDER`; it computes in `--dtype`). The model is a checkpoint, or has
random weights. Prompts have 32 random tokens, answers 128 tokens, greedy. Sides
take turns, pair by pair; a ratio is ours over theirs, with median and spread.

- `decode`: tokens per second after each answer's first, the time of a run less that of a run for one token.
- `prefill`: tokens per second of 8 prompts of 512 tokens, with one token out.
- `first_token`: seconds from the start of the process.
- `resident`: bytes then and at the end.
- `same`: share of answers that are identical to ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports import deliver
from benchmarks.serving.shared_family import SHAPES, spread
from cli.bench.where import where
from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from zoo.store import Store

_PROMPT, _LONG, _LONGS = 32, 512, 8
#: Seconds to wait before an order: the previous side's threads spin for a while (Intel's OpenMP for 0.2 s).
_PAUSE = 0.5


class Side:
    """A running engine process. Raises RuntimeError if the process ends before it answers."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str]) -> None:
        self.name = name
        begin = time.perf_counter()
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, **env},
        )
        self.started = self._answer()
        self.first_token = time.perf_counter() - begin

    def answer_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int | Sequence[int],
        models: Sequence[str] | None = None,
        at: Sequence[float] | None = None,
    ) -> dict[str, Any]:
        """Run prompts and return the answer of `sides`.

        They start at once or `at` the given times, on the side's own model or the given `models`.
        """
        return self.order({"prompts": prompts, "tokens": tokens, "models": models, "at": at})

    def order(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Send an order as a JSON line and return the answer."""
        if self._process.stdin is None:
            raise RuntimeError(f"{self.name} reads nothing")
        time.sleep(_PAUSE)
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}: {self._said.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def prompts_of(count: int, length: int, seed: int, below: int = 8000) -> list[list[int]]:
    made: list[list[int]] = torch.randint(
        3, below, (count, length), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return made


def decode(side: Side, batch: int, tokens: int, seed: int) -> dict[str, Any]:
    """Return decoded tokens per second after the first ones, and digests of the answers."""
    prompts = prompts_of(batch, _PROMPT, seed)
    first = side.answer_prompts(prompts, 1)["seconds"]
    whole = side.answer_prompts(prompts, tokens)
    return {"rate": batch * (tokens - 1) / (whole["seconds"] - first), "digest": whole["digest"]}


def prefill(side: Side, seed: int) -> dict[str, Any]:
    answer = side.answer_prompts(prompts_of(_LONGS, _LONG, seed), 1)
    return {"rate": _LONGS * _LONG / answer["seconds"], "digest": answer["digest"]}


def compare(sides: Sequence[Side], what: str, batch: int, tokens: int, pairs: int) -> dict[str, Any]:
    """Run all sides in turn. The first round is a warm-up."""
    found: list[dict[str, dict[str, Any]]] = []
    for seed in range(pairs + 1):
        order = sides if seed % 2 == 0 else list(reversed(sides))
        found.append(
            {
                side.name: decode(side, batch, tokens, seed) if what == "decode" else prefill(side, seed)
                for side in order
            }
        )
    found = found[1:]
    row: dict[str, Any] = {"what": what, "batch": batch}
    for side in sides:
        row[side.name] = {"rate": statistics.median(one[side.name]["rate"] for one in found)}
        if side is not sides[0]:
            ours = sides[0].name
            row[side.name]["ratio"] = spread([one[ours]["rate"] / one[side.name]["rate"] for one in found])
            pairs_of = [
                (a, b) for one in found for a, b in zip(one[ours]["digest"], one[side.name]["digest"], strict=True)
            ]
            row[side.name]["same"] = sum(a == b for a, b in pairs_of) / len(pairs_of)
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def launch(kind: str, what: Sequence[str], threads: int, python: Path | None = None, *options: str) -> Side:
    """Start a process of `sides`. `python` is that of an environment with vLLM or OpenVINO, for that side."""
    script = str(Path(__file__).with_name("sides.py"))
    if python is not None and kind == "openvino":
        return Side(kind, [str(python), script, kind, *what, "--threads", str(threads), *options], {})
    if kind != "vllm" or python is None:
        env = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": str(threads)}
        return Side(kind, [sys.executable, script, kind, *what, "--threads", str(threads), *options], env)
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_LOGGING_LEVEL": "ERROR",
        "LD_PRELOAD": str(python.parents[1] / "lib" / "libiomp5.so"), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    return Side(kind, [str(python), script, kind, *what, "--threads", str(threads), *options], env)


def start(args: argparse.Namespace, store: Path, model: Path) -> list[Side]:
    """Start all sides, ours first."""
    dtype = ("--dtype", args.dtype)
    sides = [launch("zoo", [str(store), "model"], args.threads, None, *dtype)]
    if args.vllm:
        sides.append(launch("vllm", [str(model)], args.threads, args.vllm, *dtype, *(["--eager"] * args.eager)))
    if args.openvino:
        sides.append(launch("openvino", [str(args.exported)], args.threads, args.openvino, *dtype))
    if not args.no_transformers:
        sides.append(launch("transformers", [str(model)], args.threads, None, *dtype))
    return sides


def make_random_model(folder: Path, size: str) -> Path:
    """Save a Llama with random float32 weights and return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPES[size])).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Our engine beside vLLM, OpenVINO and transformers on one CPU.")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM")
    parser.add_argument("--openvino", type=Path, help="Python of an environment with OpenVINO GenAI")
    parser.add_argument("--exported", type=Path, help="the model in OpenVINO's format")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--model", type=Path, help="a checkpoint; default: random weights of --size")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--size", choices=tuple(SHAPES), default="32m")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.openvino and not args.exported:
        parser.error("--openvino needs --exported")

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = args.model or make_random_model(folder / "model", args.size)
        with Store.open(folder / "store") as store:
            ingest(store, open_source(str(model)), name="model")
        sides = start(args, folder / "store", model)
        rows = [compare(sides, "decode", batch, args.tokens, args.pairs) for batch in args.batch]
        rows.append(compare(sides, "prefill", _LONGS, 1, args.pairs))
        report = {
            "benchmark": "peers",
            "model": str(args.model.name) if args.model else args.size,
            "dtype": args.dtype,
            "threads": args.threads,
            "eager": args.eager,
            "where": where("cpu", inside=True),
            "torch": version("torch"),
            "sides": {
                side.name: {
                    "first_token": side.first_token,
                    "resident_at_start": side.started["resident"],
                    "resident": side.answer_prompts(prompts_of(1, 4, 0), 1)["resident"],
                }
                for side in sides
            },
            "rows": rows,
        }
        for side in sides:
            side.close()
    deliver(report, args.output)


if __name__ == "__main__":
    main()
