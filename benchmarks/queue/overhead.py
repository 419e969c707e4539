"""Measure what a queue costs requests: those without a key, which must pay nothing, and those with one.

    python -m benchmarks.queue.overhead STORE MODEL [--requests 300] [--rounds 5] [--tokens 16] [--output FILE]

Three sides take turns on two servers, one without and one with `--queue`: requests on the server without a queue
("off"), requests without a key on the other one ("on"), and requests with a key there ("keyed"). Each round sends short
streamed requests, so many at once. Reported are seconds per round, the ratios of medians to "off", and first-token
times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.queue.servers import KillableServer, serving
from benchmarks.reports import deliver

_SIDES = ("off", "on", "keyed")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store")
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=300, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--serve", action="append", default=[], help="options of zoo serve")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {side: [] for side in _SIDES}
    firsts: dict[str, list[float]] = {side: [] for side in _SIDES}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(arguments.store, arguments.model, arguments.serve) as off,
        serving(arguments.store, arguments.model, [*arguments.serve, "--queue", f"{folder}/queue"]) as on,
    ):
        servers = {"off": off, "on": on, "keyed": on}
        for number in range(arguments.rounds + 1):
            for side in _SIDES if number % 2 else reversed(_SIDES):
                took, first = _round(servers[side], side == "keyed", arguments)
                if number:  # the first round warms up
                    seconds[side].append(took)
                    firsts[side] += first
        with on.http() as http:
            metrics = [line for line in http.get("/metrics").text.splitlines() if line.startswith("blockzoo:queue_")]
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    deliver(
        {
            "model": arguments.model,
            "requests per round": arguments.requests,
            "concurrency": arguments.concurrency,
            "tokens": arguments.tokens,
            "seconds per round": {side: [round(each, 3) for each in values] for side, values in seconds.items()},
            "ratio to off": {side: round(median / medians["off"], 3) for side, median in medians.items()},
            "first token, ms, p50": {side: round(1000 * statistics.median(each), 2) for side, each in firsts.items()},
            "journal": metrics,
        },
        arguments.output,
    )


def _round(server: KillableServer, keyed: bool, arguments: argparse.Namespace) -> tuple[float, list[float]]:
    """Return the seconds that a round takes, and the time to first token of each request."""
    body = {"model": arguments.model, "prompt": [11, 12, 13, 14], "max_tokens": arguments.tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    limits = httpx.Limits(max_connections=arguments.concurrency)
    with (
        httpx.Client(base_url=server.address, timeout=600, trust_env=False, limits=limits) as http,
        ThreadPoolExecutor(arguments.concurrency) as pool,
    ):
        began = time.monotonic()
        firsts = list(pool.map(lambda _: _request(http, body, keyed), range(arguments.requests)))
        return time.monotonic() - began, firsts


def _request(http: httpx.Client, body: dict[str, Any], keyed: bool) -> float:
    began, first = time.monotonic(), 0.0
    headers = {"Idempotency-Key": uuid.uuid4().hex} if keyed else {}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        for _ in response.iter_raw():
            first = first or time.monotonic() - began
    return first


if __name__ == "__main__":
    main()
