"""Measure a request that is longer than its agent's memory: its answer, and what lent pages cost (IL-01, IL-27).

    python -m benchmarks.cluster.long_contexts STORE MODEL [--prompt 8100] [--tokens 32] [--agents 5] [--pool 45MiB]
        [--ship pages] [--shape layers] [--kill TOKEN] [--output FILE]

`alone`: `zoo serve` with one agent that holds all K and V. `lent`: `--agents`, each with a pool of `--pool`, the model
on one of them (`--placement on-demand`), `--lending planned`. `off`: the same without lending, which refuses the
request; `error` is its answer. `--ship`: what travels for attention to lent K and V (`[loans] ship`); `--shape`: which
pages are lent (`[loans] shape`). `first_s`: until the first token; `token_ms`: median time between two tokens. `equal`:
whether `lent` gives the tokens of `alone`; `same_bits`: whether its log-probabilities are the same, those of the five
likeliest tokens, too.
`lent_share`: share of the request's K and V that other agents hold at its end, by `GET /zoo/ledger`. `--kill`: with
this token of `lent`, the agent that has lent most is killed; `lost_pages`: what it held; `recovery_ms`: the longest
time between two tokens from then on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.queue.servers import KillableServer, serving
from benchmarks.reports import deliver
from runtime.lending_config import LendingConfig, LoanShape, LoanShipping


def asked(model: str, prompt: int, tokens: int) -> dict[str, Any]:
    """Return a streamed request with a random prompt."""
    rng = random.Random(1)
    return {
        "model": model, "prompt": [rng.randrange(10, 4000) for _ in range(prompt)], "max_tokens": tokens,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True,
        "logprobs": 5,
    }  # fmt: skip


def kill_creditor(server: KillableServer) -> int:
    """Kill the agent that has lent most, and return its lent pages."""
    with server.http() as http:
        ledger, agents = http.get("/zoo/ledger").json(), http.get("/zoo/state").json()["agents"]
    lent = {each["id"]: sum(each["lent"].values()) for each in ledger["instances"]}
    name = max(lent, key=lambda each: lent[each])
    if not lent[name]:
        raise SystemExit("no agent has lent any page: make the pools smaller, or --kill a later token")
    os.kill(next(each["pid"] for each in agents if each["id"] == name), signal.SIGKILL)
    return lent[name]


def answered(server: KillableServer, body: dict[str, Any], kill: int | None = None) -> dict[str, Any]:
    """Return the tokens of a request and their times; the error instead if it is refused.

    `kill`: the token with which a creditor is killed.
    """
    begin, tokens, arrivals, ledger = time.perf_counter(), list[int](), list[float](), dict[str, Any]()
    scores: list[Any] = []
    lost = killed = 0
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return {"error": json.loads(response.read())["error"]["message"]}
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            document = json.loads(line[6:])
            if "error" in document:
                return {"error": document["error"]["message"]}
            new = [token for choice in document["choices"] for token in choice["token_ids"]]
            if new:
                arrivals.append(time.perf_counter())
                tokens += new
                scores += [choice["logprobs"] for choice in document["choices"]]
            if kill is not None and not lost and len(tokens) >= kill:
                lost, killed = kill_creditor(server), len(arrivals)
            if len(tokens) == body["max_tokens"] - 1:
                with server.http() as other:
                    ledger = other.get("/zoo/ledger").json()
    gaps = [1000 * (b - a) for a, b in itertools.pairwise(arrivals)]
    return {
        "tokens": tokens,
        "scores": [[each["token_logprobs"], each["top_logprobs"]] for each in scores],
        "first_s": arrivals[0] - begin,
        "token_ms": statistics.median(gaps),
        "ledger": ledger,
        "lost_pages": lost,
        "recovery_ms": max(gaps[killed - 1 :]) if killed else None,
        "counters": server.counters(),
    }


def lent_share(ledger: dict[str, Any]) -> float:
    """Return the share of all pages in use that one agent holds for another."""
    used = sum(each["capacity"] - each["free"] for each in ledger["instances"])
    return sum(sum(each["lent"].values()) for each in ledger["instances"]) / max(used, 1)


def measured(
    store: str, model: str, body: dict[str, Any], agents: int, pool: str, loans: dict[str, str], kill: int | None
) -> dict[str, Any]:
    """Return the measurements of the three sides.

    `loans`: settings of the table `[loans]`; `kill`: as in `answered`.
    """
    many = ("--agents", str(agents), "--agent-kv-bytes", ",".join([pool] * agents), "--placement", "on-demand")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as settings:
        settings.write("\n".join(("[loans]", *(f'{name} = "{value}"' for name, value in loans.items()), "")))
        settings.flush()
        lending = (*many, "--lending", "planned", "--config", settings.name)
        for side, options in (("alone", ()), ("lent", lending), ("off", many)):
            with serving(store, model, options) as server:
                found[side] = answered(server, body, kill if side == "lent" else None)
    alone, lent = found["alone"], found["lent"]
    counters = lent.pop("counters", {})
    told = ("loans", "loan_bytes", "preemptions", "failed_steps", "mends", "mended_tokens", "loss_restarts")
    return {
        "prompt": len(body["prompt"]),
        "pools": f"{agents} x {pool}",
        **loans,
        "off": found["off"].get("error", "answered"),
        "equal": lent.get("tokens") == alone["tokens"],
        "same_bits": lent.get("scores") == alone["scores"],
        "lent_share": lent_share(lent.pop("ledger")) if "ledger" in lent else 0.0,
        **{name: counters.get(name, 0) for name in told},
        **({} if kill is None else {name: lent.get(name) for name in ("lost_pages", "recovery_ms")}),
        "loan_s": counters.get("loan_ns", 0) / 1e9,
        **{
            f"{side}_{name}": found[side].get(name)
            for side in ("alone", "lent")
            for name in ("first_s", "token_ms", "error")
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store")
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=8100)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--agents", type=int, default=5)
    parser.add_argument("--pool", default="45MiB")
    parser.add_argument("--ship", default=LendingConfig().ship, choices=get_args(LoanShipping))
    parser.add_argument("--shape", default=LendingConfig().shape, choices=get_args(LoanShape))
    parser.add_argument("--kill", type=int)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    body = asked(given.model, given.prompt, given.tokens)
    loans = {"ship": given.ship, "shape": given.shape}
    deliver(measured(given.store, given.model, body, given.agents, given.pool, loans, given.kill), given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
