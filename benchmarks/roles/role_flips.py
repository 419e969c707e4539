"""Measure changes of an agent's role under load (TetriInfer, section 3.5; TI-27).

    python -m benchmarks.roles.role_flips STORE MODEL [--flips 20] [--clients 4] [--tokens 60] [--output FILE]

`zoo serve` runs three agent processes: one for prompts, one that decodes, and one that changes from prompts to decoding
and back, `--flips` times in all, while clients ask one request after another. Each request is answered before without
any change: `equal` is the share with the same tokens. `server_ms`: time of `POST /zoo/roles` in the server by its log,
from the headers read to the answer given, with the change in force; what runs finishes where it is, so that nothing is
drained. `flip_ms`: the same as its client sees it, which waits for a core beside agents that compute. `live_ms`: the
same of `GET /live`, which does nothing. `same_processes`: whether no agent was started again;
`loads`: measured loads of stages while roles changed.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from benchmarks.queue.servers import KillableServer, serving
from benchmarks.reports import deliver

_OPTIONS = ("--agents", "3", "--roles", "prefill,decode,prefill", "--backend", "processes")
_AGENT = "agent-2"
_PAUSE = 0.5
_CHANGED = re.compile(r"POST '/zoo/roles' 200 ([0-9.]+)s")


def bodies(model: str, count: int, tokens: int) -> list[dict[str, Any]]:
    """Return different requests with prompts of 24 to 200 tokens."""
    return [
        {"model": model, "prompt": [300 + (number * 31 + at * 7) % 4000 for at in range(24 + 11 * (number % 17))],
         "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for number in range(count)
    ]  # fmt: skip


class ClientsInTurn:
    """Clients that ask requests one after another until they are told to end."""

    def __init__(self, server: KillableServer, requests: Sequence[dict[str, Any]], clients: int) -> None:
        self._server, self._requests = server, requests
        self.answers: list[tuple[int, list[int]]] = []
        self.errors: list[str] = []
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(at, clients)) for at in range(clients)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _run(self, first: int, step: int) -> None:
        with self._server.http() as http:
            number = first
            while not self._end.is_set():
                got = http.post("/v1/completions", json=self._requests[number % len(self._requests)])
                if got.status_code != 200:
                    self.errors.append(got.text[:200])
                else:
                    self.answers.append((number % len(self._requests), got.json()["choices"][0]["token_ids"]))
                number += step


def state(server: KillableServer) -> dict[str, Any]:
    with server.http() as http:
        found: dict[str, Any] = http.get("/zoo/state").json()
    return found


def p95(values: Sequence[float]) -> float:
    """Return the least value that 95 % do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def loads(found: dict[str, Any]) -> int:
    """Return how many loads of stages the scheduler has measured."""
    return sum(int(each["count"]) for each in found["cluster"]["estimates"] if each["kind"] == "load")


def measured(store: str, model: str, flips: int, clients: int, tokens: int) -> dict[str, Any]:
    """Return the measurements of one server."""
    requests = bodies(model, 16, tokens)
    with TemporaryFile("w+") as log, serving(store, model, _OPTIONS, log=log) as server:
        with server.http() as http:
            alone = [http.post("/v1/completions", json=each).json()["choices"][0]["token_ids"] for each in requests]
            for names in (("decode", "decode", "prefill"), ("prefill", "decode", "prefill")):
                # The first makes it load its stages, as any device does with the first request there.
                roles = {f"agent-{at}": role for at, role in enumerate(names)}
                http.post("/zoo/roles", json=roles).raise_for_status()
                http.post("/v1/completions", json=requests[0]).raise_for_status()
            before = state(server)
            load = ClientsInTurn(server, requests, clients)
            load.start()
            took: dict[str, list[float]] = {"decode": [], "prefill": []}
            idle: list[float] = []
            for number in range(flips):
                time.sleep(_PAUSE)
                role = ("decode", "prefill")[number % 2]
                begin = time.perf_counter()
                http.post("/zoo/roles", json={_AGENT: role}).raise_for_status()
                took[role].append((time.perf_counter() - begin) * 1000)
                time.sleep(_PAUSE / 2)
                begin = time.perf_counter()
                http.get("/live").raise_for_status()
                idle.append((time.perf_counter() - begin) * 1000)
            load.end()
        after = state(server)
        log.seek(0)
        # Those before the load are no measurement.
        inside = [1000 * float(took) for took in _CHANGED.findall(log.read())][-flips:]
    every = sorted(each for some in took.values() for each in some)
    return {
        "flips": len(every),
        "flip_ms": {
            "median": statistics.median(every),
            "p95": p95(every),
            "most": every[-1],
            **{f"to_{role}_median": statistics.median(some) for role, some in took.items()},
        },
        "server_ms": {"median": statistics.median(inside), "p95": p95(inside), "most": max(inside)},
        "live_ms": {"median": statistics.median(idle), "p95": p95(idle), "most": max(idle)},
        "answers": len(load.answers),
        "errors": load.errors,
        "equal": sum(tokens == alone[at] for at, tokens in load.answers) / max(len(load.answers), 1),
        "handoffs": after["counters"]["handoffs"] - before["counters"]["handoffs"],
        "same_processes": [each["pid"] for each in before["agents"]] == [each["pid"] for each in after["agents"]],
        "loads": loads(after) - loads(before),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store")
    parser.add_argument("model")
    parser.add_argument("--flips", type=int, default=20)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    deliver(measured(given.store, given.model, given.flips, given.clients, given.tokens), given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
