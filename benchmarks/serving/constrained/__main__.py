"""Serve a model and ask for answers by schemas: are they valid, what do they cost, what do hostile ones do?

    python -m benchmarks.serving.constrained STORE MODEL [--schemas 200] [--rounds 11] [--output FILE]

- Validity: one request per schema at temperature 1; answers that end by themselves are checked with `jsonschema`.
- Cost: batches of `--batch` requests at once, greedy and at temperature 1, all to their `max_tokens`, in rounds that
  alternate: all free, all by a schema, half and half. Times are medians over the rounds, each beside the free side of
  its round; those of a half and half batch are of its free requests. The processor time of the server's process is
  taken too: on a busy machine it says more.
- Hostile schemas and expressions: seconds until the refusal, and the growth of the server's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from benchmarks.queue.servers import KillableServer, serving
from benchmarks.reports import deliver
from benchmarks.serving.constrained.schemas import ENDLESS, Schema, make_schemas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store")
    parser.add_argument("model")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer in a round of the cost")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", choices=("validity", "cost", "hostile"))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with serving(given.store, given.model, ["--models"]) as server:
        parts: dict[str, Callable[[], Any]] = {
            "validity": lambda: validity(server, given.model, make_schemas(given.schemas, given.seed), given.batch),
            "cost": lambda: {
                f"temperature {heat}": cost(server, given.model, given.batch, given.tokens, given.rounds, heat)
                for heat in (0.0, 1.0)
            },
            "hostile": lambda: hostile(server, given.model),
        }
        document = {name: part() for name, part in parts.items() if given.only in (None, name)}
    deliver(document, given.output)


def validity(server: KillableServer, model: str, schemas: Sequence[Schema], batch: int) -> dict[str, Any]:
    """Return how the answers to all schemas ended, and what was wrong with those that are not valid."""

    def one(number: int) -> tuple[str, str | None]:
        schema = schemas[number]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"Answer with JSON by this schema: {json.dumps(schema)[:600]}"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
            "temperature": 1.0,
            "seed": number,
            "max_tokens": 512,
        }
        with server.http() as http:
            response = http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            return f"status {response.status_code}", response.text[:300]
        choice = response.json()["choices"][0]
        if choice["finish_reason"] != "stop":
            return choice["finish_reason"], None
        try:
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(
                json.loads(choice["message"]["content"])
            )
        except (ValueError, jsonschema.ValidationError) as error:
            return "invalid", f"schema {number}: {str(error).splitlines()[0]}"
        return "valid", None

    with ThreadPoolExecutor(batch) as pool:
        ended = list(pool.map(one, range(len(schemas))))
    return {"ended": Counter(how for how, _ in ended), "wrong": [why for _, why in ended if why]}


def cost(
    server: KillableServer, model: str, batch: int, tokens: int, rounds: int, temperature: float
) -> dict[str, Any]:
    """Return milliseconds per step by the clock and of the processor, and the other sides' ratios to the free one."""
    sides = {"free": (batch, 0), "bound": (0, batch), "mixed": (batch - batch // 2, batch // 2)}
    for free, bound in sides.values():
        _round(server, model, free, bound, tokens, temperature)  # compiled, read, warm
    took: dict[str, list[float]] = {side: [] for side in sides}
    worked: dict[str, list[float]] = {side: [] for side in sides}
    draw = random.Random(0)
    for _ in range(rounds):
        for side in draw.sample(list(sides), len(sides)):
            before = _processor(server)
            took[side].append(_round(server, model, *sides[side], tokens, temperature))
            worked[side].append(_processor(server) - before)
    return {
        "step_ms": {side: round(1000 * statistics.median(times) / tokens, 3) for side, times in took.items()},
        "processor_ms_per_step": {
            side: round(1000 * statistics.median(times) / tokens, 3) for side, times in worked.items()
        },
        "ratio_of_times": _ratios(took),
        "ratio_of_processor_times": _ratios(worked),
    }


def _ratios(times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return median and quartiles of the rounds' ratios to the free side, for the other sides."""
    ratios = {
        side: [mine / free for mine, free in zip(some, times["free"], strict=True)]
        for side, some in times.items()
        if side != "free"
    }
    return {
        side: [round(each, 3) for each in (statistics.median(some), *statistics.quantiles(some, n=4)[::2])]
        for side, some in ratios.items()
    }


def _processor(server: KillableServer) -> float:
    """Return the processor seconds of the server's process so far."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _round(server: KillableServer, model: str, free: int, bound: int, tokens: int, temperature: float) -> float:
    """Run a batch at once; return the median seconds of its free requests, or of all where none is free."""

    def one(number: int) -> float:
        body: dict[str, Any] = {
            "model": model,
            "prompt": f"A list of {number + 10} animals as JSON:",
            "max_tokens": tokens,
            "temperature": temperature,
            "seed": number,
        }
        body |= {"ignore_eos": True} if number < free else {"guided_json": ENDLESS}
        with httpx.Client(base_url=server.address, timeout=600, trust_env=False) as http:
            begin = time.perf_counter()
            done = http.post("/v1/completions", json=body).json()
            if done["usage"]["completion_tokens"] != tokens:
                raise RuntimeError(f"an answer of {done['usage']['completion_tokens']} tokens: {done['choices']}")
            return time.perf_counter() - begin

    with ThreadPoolExecutor(free + bound) as pool:
        times = list(pool.map(one, range(free + bound)))
    return statistics.median(times[:free] or times)


def hostile(server: KillableServer, model: str) -> list[dict[str, Any]]:
    """Return status, seconds and growth of the server's memory (bytes) of hostile requests."""
    either = [[{"type": "object", "properties": {f"p{i}{j}": {}}} for j in range(4)] for i in range(6)]
    patterns = [{"type": "string", "pattern": f"a.{{{j}}}b.*"} for j in range(500)]
    asked: dict[str, dict[str, Any]] = {
        "allOf of anyOf": {"guided_json": {"allOf": [{"anyOf": some} for some in either]}},
        "allOf of patterns": {"guided_json": {"allOf": patterns}},
        "properties by allOf": {"guided_json": {"allOf": [_strings(f"a.*b{j}") for j in range(50)]}},
        "itself only": {"guided_json": {"$ref": "#"}},
        "20,000 values": {"guided_json": {"enum": list(range(20_000))}},
        "deep": {"guided_json": json.loads('{"items":' * 150 + "{}" + "}" * 150)},
        "nested expression": {"guided_regex": "(" * 3000 + "a" + ")" * 3000},
        "long expression": {"guided_regex": "a" * 100_000},
        "expression with many states": {"guided_regex": "(.*a.{500}|b)*c"},
        "nested grammar": {"guided_grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000},
    }  # fmt: skip
    results = []
    for name, fields in asked.items():
        before = _memory(server)
        begin = time.perf_counter()
        with server.http() as http:
            response = http.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 400, **fields})
        seconds = time.perf_counter() - begin
        message = response.json().get("error", {}).get("message", "")[:120]
        results.append(
            {
                "name": name,
                "status": response.status_code,
                "seconds": round(seconds, 3),
                "grown_bytes": _memory(server) - before,
                "message": message,
            }
        )
    return results


def _strings(pattern: str) -> Schema:
    return {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": pattern} for i in range(30)}}


def _memory(server: KillableServer) -> int:
    """Return the resident bytes of the server's process."""
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS")


if __name__ == "__main__":
    main()
