"""Measure the cost of HTTP: the same requests on the engine alone and, in turns, through `zoo serve`.

    python -m benchmarks.serving.through_http [--clients 64] [--requests N] [--tokens 128] [--prompt 32] [--pairs 5]
        [--threads N] [--layers 8] [--backend auto|inline|local] [--set NAME=VALUE]… [--output FILE]

The model is a random Llama of 32 M parameters with a byte-level vocabulary of 8192, so that every token has text. Three
processes stay up: the engine without a server, the server, and its clients; all use the same cores, one side at a time.

- `ratio`: tokens per second through HTTP over those without, per pair; median and spread.
- `microseconds_per_token`: CPU time of `engine`, the process without a server; `server`, the whole server process;
  `loop`, its event loop's thread; `client`, the clients' process.
- `first_ms`: milliseconds to a request's first token.

`--backend` selects the driver of both. `--set` sets environment variables of both engines, such as
OMP_WAIT_POLICY=passive. Fewer `--layers` make a faster engine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from benchmarks.serving.peers import Side
from benchmarks.serving.shared_family import SHAPES, spread

_SERVE = "from cli.app import main; main()"
_BUDGET = 2048


def make_model(folder: Path, layers: int) -> None:
    """Write a checkpoint with a tokenizer trained on a part of Python's standard library."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPES["32m"], "num_hidden_layers": layers})
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(path) for path in sorted(Path(os.__file__).parent.glob("*.py"))[:80]], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)  # noqa: S106


class Server:
    """A running `zoo serve`. Raises RuntimeError if it ends before it listens.

    `program`: Python code that runs `zoo` with the arguments of the process.
    """

    def __init__(
        self,
        store: Path,
        env: dict[str, str],
        backend: str = "auto",
        arguments: Sequence[str] = (),
        program: str = _SERVE,
    ) -> None:
        log = store.with_name("serve.log")
        command = [
            sys.executable,
            "-c",
            program,
            "serve",
            "--store",
            str(store),
            "--port",
            "0",
            "--max-num-batched-tokens",
            str(_BUDGET),
        ]
        command += ["--backend", backend, *arguments]
        with log.open("w") as said:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=said, text=True, env={**os.environ, **env}
            )
        self.address = "" if self._process.stdout is None else self._process.stdout.readline().strip()
        if not self.address:
            raise RuntimeError(f"the server ended with {self._process.wait()}: {log.read_text()[-2000:]}")

    def spent(self) -> tuple[float, float]:
        """Return CPU seconds of the whole process, and of its first thread, which runs the event loop."""
        tasks = {int(task.name): task for task in Path(f"/proc/{self._process.pid}/task").iterdir()}
        seconds = {name: int((task / "schedstat").read_text().split()[0]) / 1e9 for name, task in tasks.items()}
        return sum(seconds.values()), seconds[self._process.pid]

    def resident(self) -> int:
        """Return the bytes of memory that the process has now."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)


def alone(side: Side, order: dict[str, int]) -> dict[str, Any]:
    answer = side.order(order)
    return {
        "rate": answer["tokens"] / answer["seconds"],
        "engine": answer["cpu"] / answer["tokens"],
        "first": answer["first"],
    }


def through(side: Side, server: Server, order: dict[str, int]) -> dict[str, Any]:
    before = server.spent()
    answer = side.order(order)
    whole, loop = (b - a for a, b in zip(before, server.spent(), strict=True))
    tokens = answer["tokens"]
    shares = {"server": whole / tokens, "loop": loop / tokens, "client": answer["cpu"] / tokens}
    return {"rate": tokens / answer["seconds"], "first": answer["first"], **shares}


def measure(engine: Side, client: Side, server: Server, order: dict[str, int], pairs: int) -> dict[str, Any]:
    """Run pairs in turns. The first one is a warm-up."""
    found: list[dict[str, dict[str, Any]]] = []
    for seed in range(pairs + 1):
        one = {**order, "seed": seed}
        if seed % 2:
            found.append({"http": through(client, server, one), "alone": alone(engine, one)})
        else:
            found.append({"alone": alone(engine, one), "http": through(client, server, one)})
    return summary(found[1:])


def summary(found: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    def middle(side: str, what: str) -> float:
        return statistics.median(pair[side][what] for pair in found)

    microseconds = {
        what: round(1e6 * middle(side, what), 1)
        for side, what in (("alone", "engine"), ("http", "server"), ("http", "loop"), ("http", "client"))
    }
    return {
        "ratio": spread([pair["http"]["rate"] / pair["alone"]["rate"] for pair in found]),
        "tokens_per_second": {side: round(middle(side, "rate"), 1) for side in ("alone", "http")},
        "microseconds_per_token": microseconds,
        "first_ms": {
            side: _quantiles([1000 * one for pair in found for one in pair[side]["first"]])
            for side in ("alone", "http")
        },
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What HTTP costs beside the engine alone.")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument(
        "--requests", type=int, help="per side and pair; as many as there are clients, and at least 4, if not given"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--backend", choices=("auto", "inline", "local"), default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="environment of both engines")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    from cli.bench.where import where
    from surgery.ingest.ingest import ingest
    from surgery.sources import open_source
    from zoo.store import Store

    env = {"OMP_NUM_THREADS": str(args.threads), **dict(one.split("=", 1) for one in args.set)}
    order = {
        "clients": args.clients,
        "requests": args.requests or max(4, args.clients),
        "prompt": args.prompt,
        "tokens": args.tokens,
    }
    asking = [sys.executable, "-m", "benchmarks.serving.asking"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model", args.layers)
        with Store.open(folder / "store") as store:
            ingest(store, open_source(str(folder / "model")), name="model")
        options = ["--threads", str(args.threads), "--max-num-batched-tokens", str(_BUDGET), "--backend", args.backend]
        engine = Side("engine", [*asking, "inside", str(folder / "store"), "model", *options], env)
        server = Server(folder / "store", env, args.backend)
        client = Side("client", [*asking, "http", server.address, "model"], {})
        report = {
            "benchmark": "through_http", "threads": args.threads, "layers": args.layers, "backend": args.backend,
            "environment": args.set, **order,
            "where": where("cpu", inside=True), **measure(engine, client, server, order, args.pairs),
        }  # fmt: skip
        for one in (engine, client, server):
            one.close()
    deliver(report, args.output)


if __name__ == "__main__":
    main()
