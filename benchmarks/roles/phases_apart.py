"""Compare answers with prompts and decoding on separate agent processes with those of one device (TI-02, TI-15).

    python -m benchmarks.roles.phases_apart STORE MODEL … [--requests 64] [--sides NAME …] [--output FILE]

Each side is a `zoo serve` of its own, and answers the same requests, eight at a time, over HTTP: of all models in turn;
greedy, sampled, with penalties, and with log-probabilities; with prompts of one to five chunks of 64 tokens, some of
which begin alike. `equal`: share of answers with the tokens, and log-probabilities within 1e-4, of one device.
`prompt_devices` and `decode_devices`: which agents ran rows of prompts, and rows behind them, by the trace.
`transfers`: of K and V; `expected_transfers`: one for each hand-off, or with `--handoff-grain chunk|layer` one for each
chunk of its prompt, chunks of which pages were still on their way counted once. `bytes` of K and V: the same for all
grains, but for `present` tokens, which a sequence that decodes there had when a prompt that begins alike was handed
off.
`1+1 meanwhile` decodes until the hand-off where the prompt ran, so that agent decodes, too, and
more bytes travel, in more transfers than one for each.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.queue.servers import KillableServer, serving
from benchmarks.reports import deliver

CHUNK = 64
_KINDS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.8, "seed": 5},
    {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0, "logprobs": 3},
)
_COMMON = ("--backend", "processes", "--long-prefill-token-threshold", str(CHUNK))
#: Roles of each side's agents, and its further options.
SIDES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "1+1": ("prefill,decode", ("--handoff-grain", "request")),
    "1+1 chunk": ("prefill,decode", ("--handoff-grain", "chunk")),
    "1+1 chunk cached": ("prefill,decode", ("--handoff-grain", "chunk", "--prefix-caching", "cached")),
    "1+1 meanwhile": ("prefill,decode", ("--until-handoff", "decode")),
    "1+1 layer": ("prefill,decode", ("--handoff-grain", "layer")),
    "1+1 layer cached": ("prefill,decode", ("--handoff-grain", "layer", "--prefix-caching", "cached")),
    "1+2": ("prefill,decode,decode", ("--handoff-grain", "request")),
    "1+2 chunk cut": ("prefill,decode,decode", ("--handoff-grain", "chunk", "--placement", "partition")),
    "2+1 layer cut": ("prefill,prefill,decode", ("--handoff-grain", "layer", "--placement", "partition")),
    "2+1 chunk": ("prefill,prefill,decode", ("--handoff-grain", "chunk")),
    "2+1 cut": ("prefill,prefill,decode", ("--handoff-grain", "request", "--placement", "partition")),
}


def requests_of(models: Sequence[str], count: int, vocabulary: int, tokens: int) -> list[dict[str, Any]]:
    """Return bodies of completions; the models in turn, then the kinds, and every third prompt begins alike."""
    rng = random.Random(3)
    alike = [rng.randrange(10, vocabulary) for _ in range(100)]
    bodies = []
    for number in range(count):
        prompt = [rng.randrange(10, vocabulary) for _ in range(rng.randrange(12, 5 * CHUNK - 100))]
        bodies.append(
            {
                "model": models[number % len(models)],
                "prompt": alike + prompt if number // len(models) % 3 == 0 else prompt,
                "max_tokens": tokens,
                "ignore_eos": True,
                "return_token_ids": True,
                **_KINDS[number // len(models) % len(_KINDS)],
            }
        )
    return bodies


def answered(server: KillableServer, bodies: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the choice of each answer; raise on any other status than 200."""
    with server.http() as http, ThreadPoolExecutor(8) as pool:

        def one(body: Mapping[str, Any]) -> Mapping[str, Any]:
            got: httpx.Response = http.post("/v1/completions", json=dict(body))
            got.raise_for_status()
            choice: Mapping[str, Any] = got.json()["choices"][0]
            return choice

        return list(pool.map(one, bodies))


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two choices have the same tokens and finish, and log-probabilities within 1e-4."""
    if any(one[name] != other[name] for name in ("token_ids", "finish_reason")):
        return False
    if one["logprobs"] is None or other["logprobs"] is None:
        return one["logprobs"] is other["logprobs"]
    pairs = zip(one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"], strict=True)
    return all(math.isclose(a, b, abs_tol=1e-4) for a, b in pairs)


def passed(trace: Path) -> tuple[set[str], set[str], int]:
    """Return the devices of rows of prompts, those of rows behind them, and the chunks of prompts handed off."""
    prompts: dict[str, int] = {}
    first: set[str] = set()
    second: set[str] = set()
    chunks = 0
    for line in trace.read_text().splitlines():
        event = json.loads(line)
        if event["ev"] == "arrive":
            prompts[event["seq"]] = event["n"]
        elif event["ev"] == "block.hop":
            (first if event["start"] < prompts[event["seq"]] else second).add(event["to"])
        elif event["ev"] == "phase" and event["phase"] == "transfer":
            chunks += math.ceil(prompts[event["seq"]] / CHUNK)
    return first, second, chunks


def measured(store: str, models: Sequence[str], sides: Sequence[str], bodies: Sequence[Mapping[str, Any]]) -> Any:
    """Return, by side, what its servers did."""
    with serving(store, models[0], ("--agents", "1", *_COMMON[2:], *models[1:])) as server:
        answered(server, bodies[:1])
        alone = answered(server, bodies)
    found: dict[str, Any] = {}
    for side in sides:
        roles, options = SIDES[side]
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            agents = ("--agents", str(len(roles.split(","))), "--roles", roles)
            with serving(store, models[0], (*agents, *_COMMON, *options, "--trace", str(trace), *models[1:])) as server:
                begin = time.perf_counter()
                answers = answered(server, bodies)
                seconds = time.perf_counter() - begin
                counters = server.counters()
                server.process.terminate()
                server.process.wait(60)
            first, second, chunks = passed(trace)
        found[side] = {
            "roles": roles,
            "options": " ".join(options),
            "equal": statistics.fmean(same(one, other) for one, other in zip(answers, alone, strict=True)),
            "prompt_devices": sorted(first),
            "decode_devices": sorted(second),
            "handoffs": counters["handoffs"],
            "aborted": counters["handoffs_aborted"],
            "transfers": counters["handoff_transfers"],
            "expected_transfers": chunks if "chunk" in side or "layer" in side else counters["handoffs"],
            "bytes": counters["handoff_bytes"],
            "present": counters["handoff_present_tokens"],
            "recomputed": counters["recomputed"],
            "handoff_ms": counters["handoff_ns"] / max(counters["handoffs"], 1) / 1e6,
            "seconds": seconds,
        }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=tuple(SIDES))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    bodies = requests_of(given.models, given.requests, given.vocabulary, given.tokens)
    deliver(measured(given.store, given.models, given.sides, bodies), given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
