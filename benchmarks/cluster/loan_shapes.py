"""Measure tokens of a request of which an agent holds some page sets of all layers, or all of some layers.

    python -m benchmarks.cluster.loan_shapes STORE MODEL [--prompts 500,1500,4000] [--shares 0.2,0.5] [--tokens 24]
        [--rounds 3] [--shapes tokens,layers,cheapest] [--output FILE]

Three agents, the model on one of them (`--placement on-demand`). For each prompt and share the pools are such that
about this share of the request's K and V lies on other agents at the end (`lent`: of the pages in use; 0 where the
answer had ended before it was asked for). In each round a server for each shape (`[loans] shape`; with `:python` behind
it, also `native = false`) answers the same request, in turns. `token_ms`: median time between two tokens, of each
round; `equal`: all answers have the same tokens; `over_first`: the median of a shape over that of the first.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.cluster.long_contexts import answered, asked, lent_share
from benchmarks.queue.servers import serving
from benchmarks.reports import deliver
from runtime.lending_config import LoanShape
from zoo.api import Zoo


def context_bytes(store: str, model: str, tokens: int) -> int:
    """Return the bytes of K and V of so many tokens of a model, in bfloat16."""
    with Zoo(store) as zoo:
        config = zoo.model(model).config
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return int(tokens * config["num_hidden_layers"] * 2 * config.get("num_key_value_heads", heads) * width * 2)


def one(store: str, model: str, body: dict[str, Any], pool: int, shape: str) -> dict[str, Any]:
    """Return what a server with loans of this shape answers."""
    options = ("--agents", "3", "--agent-kv-bytes", f"{pool},{pool},{pool}", "--placement", "on-demand")
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as settings:
        name, _, python = shape.partition(":")
        settings.write(f'[loans]\nshape = "{name}"\nrecall = 1.0\nnative = {"false" if python else "true"}\n')
        settings.flush()
        with serving(store, model, (*options, "--lending", "planned", "--config", settings.name)) as server:
            return answered(server, body)


def point(
    store: str, model: str, prompt: int, share: float, tokens: int, rounds: int, shapes: tuple[str, ...]
) -> dict[str, Any]:
    """Return the measurements of one context and share."""
    body = asked(model, prompt, tokens)
    pool = int(context_bytes(store, model, prompt + tokens) * (1 - share))
    found: dict[str, list[dict[str, Any]]] = {shape: [] for shape in shapes}
    for number in range(rounds):
        first = number % len(shapes)
        for shape in shapes[first:] + shapes[:first]:
            found[shape].append(one(store, model, body, pool, shape))
    times = {shape: [each["token_ms"] for each in made] for shape, made in found.items()}
    middle = {shape: statistics.median(each) for shape, each in times.items()}
    answers = {tuple(each["tokens"]) for made in found.values() for each in made}
    return {
        "prompt": prompt,
        "share": share,
        "lent": {shape: [round(lent_share(each["ledger"]), 2) for each in made] for shape, made in found.items()},
        "loans": {shape: made[0]["counters"].get("loans") for shape, made in found.items()},
        "equal": len(answers) == 1,
        "token_ms": {shape: [round(each, 1) for each in sorted(made)] for shape, made in times.items()},
        "over_first": {shape: round(each / middle[shapes[0]], 3) for shape, each in middle.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store")
    parser.add_argument("model")
    parser.add_argument("--prompts", default="500,1500,4000")
    parser.add_argument("--shares", default="0.2,0.5")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default=",".join(get_args(LoanShape)))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    grid = [(int(prompt), float(share)) for prompt in given.prompts.split(",") for share in given.shares.split(",")]
    shapes = tuple(given.shapes.split(","))
    if not {shape.removesuffix(":python") for shape in shapes} <= set(get_args(LoanShape)):
        parser.error(f"shapes are {', '.join(get_args(LoanShape))}, each also with :python")
    points = [point(given.store, given.model, *each, given.tokens, given.rounds, shapes) for each in grid]
    deliver({"points": points}, given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
