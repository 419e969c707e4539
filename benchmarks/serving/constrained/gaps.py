"""Measure how long streams without a grammar wait for a token while requests with new grammars come.

    python -m benchmarks.serving.constrained.gaps STORE MODEL [--streams 8] [--requests 6] [--rounds 3] [--output FILE]

Streams run all the time. Phases, each round in this order, except for the first, which is once in a server's life:

- first: the first request with a grammar, for which the vocabulary is read;
- none: nothing comes;
- known: requests with a grammar that has come before;
- large: requests with schemas that have not come before and take long to compile (some 4,000 values each).

Reported are the gaps between two events of a stream, in milliseconds: the median, 99 % and the longest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.queue.servers import KillableServer, serving
from benchmarks.reports import deliver

#: Seconds between two phases, and of the phase in which nothing comes.
_PAUSE, _QUIET = 1.0, 3.0
_KNOWN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class FreeStreams:
    """Streams of one model, begun anew when they end, until the block ends."""

    def __init__(self, server: KillableServer, model: str, count: int) -> None:
        self._server, self._model = server, model
        self._over = threading.Event()
        #: When the later one of two events of a stream came, and the seconds between them.
        self.gaps: list[tuple[float, float]] = []
        self._threads = [threading.Thread(target=self._follow, args=(number,)) for number in range(count)]

    def __enter__(self) -> FreeStreams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, number: int) -> None:
        body = {
            "model": self._model, "prompt": f"A list of {number} animals:", "max_tokens": 200, "ignore_eos": True,
            "stream": True, "temperature": 0,
        }  # fmt: skip
        while not self._over.is_set():
            last = 0.0
            with self._server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    if self._over.is_set():
                        return
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if last:
                            self.gaps.append((now, now - last))
                        last = now


def large_schema(number: int) -> dict[str, Any]:
    """Return a schema that no other number has."""
    fields = [
        {f"a{at}": {"type": "integer", "minimum": part, "maximum": 1000 + at} for at in range(10)}
        for part in range(130)
    ]
    parts = {f"k{number}_{part}": {"type": "object", "properties": some} for part, some in enumerate(fields)}
    return {"type": "object", "properties": parts}


def summary(gaps: Sequence[float]) -> dict[str, float]:
    """Return median, 99 % and maximum of seconds, in milliseconds, and their number."""
    ordered = sorted(gaps)
    chosen = {
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "longest": ordered[-1],
    }
    return {"events": len(ordered), **{name: round(1000 * each, 1) for name, each in chosen.items()}}


def measure(server: KillableServer, model: str, streams: int, requests: int, rounds: int) -> dict[str, Any]:
    """Return the gaps by phase."""
    fresh = iter(range(10**6))

    def ask(*schemas: dict[str, Any]) -> None:
        for schema in schemas:
            body = {"model": model, "prompt": "x", "max_tokens": 4, "temperature": 0, "guided_json": schema}
            with server.http() as http:
                response: httpx.Response = http.post("/v1/completions", json=body)
            if response.status_code != 200:
                raise RuntimeError(f"status {response.status_code}: {json.dumps(response.json())[:300]}")

    phases: dict[str, Callable[[], None]] = {
        "none": lambda: time.sleep(_QUIET),
        "known": lambda: ask(*[_KNOWN] * requests),
        "large": lambda: ask(*(large_schema(next(fresh)) for _ in range(requests))),
    }
    found: dict[str, list[float]] = defaultdict(list)
    with FreeStreams(server, model, streams) as running:

        def watch(name: str, phase: Callable[[], None]) -> None:
            time.sleep(_PAUSE)
            begin = time.perf_counter()
            phase()
            end = time.perf_counter()
            time.sleep(_PAUSE)  # a gap that began in the phase has ended
            found[name] += [gap for at, gap in running.gaps if at >= begin and at - gap <= end]

        watch("first", lambda: ask(_KNOWN))
        for _ in range(rounds):
            for name, phase in phases.items():
                watch(name, phase)
    return {name: summary(gaps) for name, gaps in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store")
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=6, help="of each phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with serving(given.store, given.model, ["--models"]) as server:
        document = measure(server, given.model, given.streams, given.requests, given.rounds)
    deliver(document, given.output)


if __name__ == "__main__":
    main()
