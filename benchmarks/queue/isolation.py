"""Measure what a batch does to interactive requests: latencies alone and beside it, memory, stalls of the event loop.

    python -m benchmarks.queue.isolation [--lines 2000] [--rate 2] [--alone 60] [--most 300] [--tokens 16]
        [--batch-tokens 4] [--layers 2] [--max-num-seqs 32] [--stored STORE MODEL] [--output FILE]

One `zoo serve --queue` with a random Llama (32 M parameters at 8 layers), or a stored model. Interactive requests come
at fixed moments, `rate` a second, with prompts of 32 tokens and `tokens` tokens out, streamed: `--alone` seconds
without a batch, then from the batch's submission to its end, or `--most` seconds, then `--alone` seconds without it
again. No prompt comes twice.

- `first_ms`, `whole_ms`: of interactive requests, from the moment at which they were due.
- `tenths`: the same of each tenth of the phase, with the lines that had been answered at its end.
- `after`: without the batch again. What it differs by from `alone`, the batch has left behind, or time has brought.
- `live_ms`: of `GET /live`, asked every 20 ms: what the event loop's stalls, and the machine, make of a trivial route.
- `memory_mb`: resident memory of the server before the batch, its maximum beside it, and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks.queue.stalls import watched
from benchmarks.reports import deliver
from benchmarks.serving.through_http import Server, make_model

_PROBE = 0.02
_PARTS = 10
#: Seconds of the warm-up, and between the batch's end and what is measured after it.
_WARM, _SETTLE = 3.0, 2.0


@dataclass
class Watched:
    """What was seen in one phase; seconds and bytes. `asked`: by when it was due, a request's first token and end."""

    begin: float = field(default_factory=time.monotonic)
    asked: list[tuple[float, float, float]] = field(default_factory=list)
    live: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {
            "requests": len(self.asked),
            "first_ms": quantiles([first for _, first, _ in self.asked]),
            "whole_ms": quantiles([whole for _, _, whole in self.asked]),
            "live_ms": quantiles(self.live),
        }

    def tenths(self, answered: Sequence[tuple[float, int]]) -> list[dict[str, Any]]:
        """Return quantiles of each tenth of the phase. `answered`: lines by the time at which they were counted."""
        end = max(*(due for due, _, _ in self.asked), *(at for at, _ in answered[-1:]))
        found: list[dict[str, Any]] = []
        edges = [self.begin + (end - self.begin) * part / _PARTS for part in range(_PARTS + 1)]
        for since, until in pairwise(edges):
            some = [(first, whole) for due, first, whole in self.asked if since <= due < until or due == until == end]
            lines = [count for at, count in answered if at <= until]
            tenth: dict[str, Any] = {"until_s": round(until - self.begin, 1), "lines": lines[-1] if lines else 0}
            for name, times in ("first_ms", [first for first, _ in some]), ("whole_ms", [whole for _, whole in some]):
                tenth[name] = {of: ms for of, ms in quantiles(times).items() if of in ("p50", "p95")}
            found.append(tenth)
        return found


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return quantiles in milliseconds; none of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {
        name: round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)
        for name, share in shares.items()
    }


def prompt_of(draw: random.Random, count: int = 32) -> list[int]:
    return [draw.randrange(300, 8000) for _ in range(count)]


def lines(count: int, tokens: int, model: str) -> bytes:
    """Return the input file of a batch."""
    draw = random.Random(1)
    return b"".join(
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {
                    "model": model, "prompt": prompt_of(draw), "max_tokens": tokens, "temperature": 0,
                    "ignore_eos": True,
                },
            }
        ).encode()
        + b"\n"
        for number in range(count)
    )  # fmt: skip


async def ask(
    client: httpx.AsyncClient, args: argparse.Namespace, draw: random.Random, due: float, seen: Watched
) -> None:
    body = {
        "model": args.model, "prompt": prompt_of(draw), "max_tokens": args.tokens, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    first = 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_bytes():
            first = first or time.monotonic()
    seen.asked.append((due, first - due, time.monotonic() - due))


async def watch(
    client: httpx.AsyncClient,
    server: Server,
    args: argparse.Namespace,
    draw: random.Random,
    seconds: float,
    over: Callable[[], bool] = lambda: False,
) -> Watched:
    """Send interactive requests and probes until a time, or until `over`."""
    seen = Watched()
    end, asked = seen.begin + seconds, set[asyncio.Task[None]]()

    async def probe() -> None:
        while True:
            at = time.monotonic()
            (await client.get("/live")).raise_for_status()
            seen.live.append(time.monotonic() - at)
            seen.memory.append(server.resident())
            await asyncio.sleep(_PROBE)

    probing = asyncio.create_task(probe())
    due = seen.begin
    while due < end and not over():
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        asked.add(asyncio.create_task(ask(client, args, draw, due, seen)))
        due += 1 / args.rate
    await asyncio.gather(*asked)
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    return seen


async def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.address, timeout=300, limits=limits, trust_env=False) as client:
        # One for all phases: prompts that came before would be read from the prefix cache.
        draw = random.Random(2)
        await watch(client, server, args, draw, _WARM)
        alone = await watch(client, server, args, draw, args.alone)
        content = lines(args.lines, args.batch_tokens, args.model)
        status: dict[str, Any] = {"status": "validating"}
        stamps: dict[str, float] = {}
        answered: list[tuple[float, int]] = []

        async def run_batch() -> None:
            nonlocal status
            began = time.monotonic()
            file = await client.post("/v1/files", files={"file": ("in", content)}, data={"purpose": "batch"})
            file.raise_for_status()
            stamps["uploaded"] = time.monotonic() - began
            order = {
                "input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h",
            }  # fmt: skip
            status = (await client.post("/v1/batches", json=order)).json()
            while status["status"] in ("validating", "in_progress", "finalizing"):
                await asyncio.sleep(0.25)
                status = (await client.get(f"/v1/batches/{status['id']}")).json()
                stamps.setdefault(status["status"], time.monotonic() - began)
                answered.append((time.monotonic(), status["request_counts"]["completed"]))

        batch = asyncio.create_task(run_batch())
        beside = await watch(client, server, args, draw, args.most, batch.done)
        if batch.done():
            batch.result()
        elif "id" in status:
            await client.post(f"/v1/batches/{status['id']}/cancel")
        batch.cancel()
        await asyncio.sleep(_SETTLE)
        memory_after = server.resident()
        after = await watch(client, server, args, draw, args.alone)
        counts = status["request_counts"]
        return {
            "alone": alone.summary(),
            "beside": beside.summary() | {"tenths": beside.tenths(answered)},
            "after": after.summary(),
            "p95_ratio": {
                "beside": _ratio(beside, alone),
                "beside_to_both": _ratio(beside, alone, after),
                "after": _ratio(after, alone),
            },
            "batch": {"status": status["status"], **counts, "mb": round(len(content) / 1e6, 1)},
            "seconds_since_upload": {name: round(value, 1) for name, value in stamps.items()},
            "memory_mb": {
                "before": round(alone.memory[-1] / 1e6),
                "most": round(max(beside.memory) / 1e6),
                "after": round(memory_after / 1e6),
            },
        }


def _ratio(seen: Watched, *beside: Watched) -> float:
    """Return a phase's 95th percentile of whole answers over that of other phases."""
    others = [whole for each in beside for _, _, whole in each.asked]
    return round(quantiles([whole for _, _, whole in seen.asked])["p95"] / quantiles(others)["p95"], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description="A batch beside interactive requests.")
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=2)
    parser.add_argument("--alone", type=float, default=60)
    parser.add_argument("--most", type=float, default=300)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--batch-tokens", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--stored", nargs=2, metavar=("STORE", "MODEL"), help="a model that a store has")
    parser.add_argument("--stalls", type=Path, help="where `benchmarks.queue.stalls` writes what stalled the loop")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    from cli.bench.where import where
    from surgery.ingest.ingest import ingest
    from surgery.sources import open_source
    from zoo.store import Store

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source, args.model = args.stored or (str(folder / "store"), "model")
        if args.stored is None:
            make_model(folder / "model", args.layers)
            with Store.open(Path(source)) as store:
                ingest(store, open_source(str(folder / "model")), name=args.model)
        arguments = ["--queue", str(folder / "queue"), "--max-num-seqs", str(args.max_num_seqs)]
        threads = {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}
        program = {} if args.stalls is None else {"program": watched(args.stalls)}
        server = Server(Path(source), threads, "auto", arguments, **program)
        try:
            found = asyncio.run(measure(server, args))
        finally:
            server.close()
    given = {name: value for name, value in vars(args).items() if name not in ("output", "stalls")}
    deliver({"benchmark": "isolation", **given, "where": where("cpu", inside=True), **found}, args.output)


if __name__ == "__main__":
    main()
