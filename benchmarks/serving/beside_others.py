"""Measure decoding beside busy processes: tokens per second alone and beside one and two, and the share that is left.

    python -m benchmarks.serving.beside_others STORE MODEL [--http] [--clients 1 16] [--busy 0 1 2] [--rounds 3]
        [--tokens 96] [--threads N] [--side NAME[,VARIABLE=VALUE…]]… [--output FILE]

Each `--side` is an engine in its own process with these environment variables; default: the kernels' own threads and,
for comparison, OpenMP's threads, which spin as long as they do by default. A busy process is a Python loop that never
waits, in a session of its own. Sides take turns, and wait while another one is measured. With `--http` the clients
stream answers from `zoo serve`.

- `rate`: tokens per second, from the start of the requests to the last token; median and spread of the rounds. Answers
  have the same length with any number of busy processes, so that the work, prompts included, is the same.
- `alone`: that rate as a share of the same side's rate without busy processes.
- `of_fair`: the same as a share of a fair one, `fair`: 1 / (1 + busy processes), for as many busy processes as there
  are cores at most. Schedulers divide cores by sessions or containers: each of these programs has the same share.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from benchmarks.serving.peers import Side
from benchmarks.serving.shared_family import spread
from benchmarks.serving.through_http import Server
from runtime.processors import prepare_openmp

_LOOP = "while True: pass"
_SIDES = ("own", "openmp,BLOCKZOO_KERNEL_THREADS=openmp,GOMP_SPINCOUNT=300000")
_ASKING = (sys.executable, "-m", "benchmarks.serving.asking")
_PROMPT = 32


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` loops that never wait."""
    running = [subprocess.Popen([sys.executable, "-c", _LOOP], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


@dataclass
class MeasuredSide:
    """An engine under measurement: `side` takes the orders, `server` answers them if they go through HTTP."""

    name: str
    side: Side
    server: Server | None
    #: By clients and busy processes.
    rates: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def measure(self, clients: int, busy: int, tokens: int) -> None:
        """Measure one rate, with answers of `tokens` tokens."""
        past = self.rates.setdefault((clients, busy), [])
        order = {"clients": clients, "requests": clients, "prompt": _PROMPT, "tokens": tokens, "seed": len(past)}
        with busy_processes(busy):
            answer = self.side.order(order)
        past.append(answer["tokens"] / answer["seconds"])
        print(self.name, clients, busy, round(past[-1], 1), file=sys.stderr, flush=True)

    def close(self) -> None:
        self.side.close()
        if self.server is not None:
            self.server.close()


def start(given: str, args: argparse.Namespace) -> MeasuredSide:
    """Start a side. `given`: its name and environment variables, separated by commas."""
    name, *variables = given.split(",")
    env = {"OMP_NUM_THREADS": str(args.threads), **dict(one.split("=", 1) for one in variables)}
    if args.http:
        server = Server(args.store, env)
        return MeasuredSide(name, Side(name, [*_ASKING, "http", server.address, args.model], {}), server)
    prepare_openmp(env)
    inside = [*_ASKING, "inside", str(args.store), args.model, "--threads", env["OMP_NUM_THREADS"]]
    return MeasuredSide(name, Side(name, inside, env), None)


def rows_of(sides: Sequence[MeasuredSide]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for side in sides:
        for (clients, busy), rates in side.rates.items():
            rates, fair = rates[1:] or rates, 1 / (1 + busy)
            row = {"side": side.name, "clients": clients, "busy": busy, "rate": spread(rates)}
            if (clients, 0) in side.rates:
                alone = side.rates[clients, 0]
                share = statistics.median(rates) / statistics.median(alone[1:] or alone)
                row |= {"alone": round(share, 3), "fair": round(fair, 3), "of_fair": round(share / fair, 3)}
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding beside busy processes.")
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--http", action="store_true", help="through zoo serve, streamed")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3, help="after a warm-up")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--side", action="append", metavar="NAME[,VARIABLE=VALUE…]")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    from cli.bench.where import where

    sides = [start(one, args) for one in args.side or _SIDES]
    for number in range(args.rounds + 1):
        for clients in args.clients:
            for busy in args.busy:
                for side in sides if number % 2 else reversed(sides):
                    side.measure(clients, busy, args.tokens)
    for side in sides:
        side.close()
    found = {"benchmark": "beside_others", "model": args.model, "http": args.http, "threads": args.threads}
    deliver({**found, "where": where("cpu", inside=True), "rows": rows_of(sides)}, args.output)


if __name__ == "__main__":
    main()
