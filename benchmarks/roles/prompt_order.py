"""Measure orders of prompts on the real engine (TI-06 to TI-08).

    python -m benchmarks.roles.prompt_order STORE MODEL [--requests 48] [--light 8,32] [--heavy 513,900]
        [--tokens 8] [--side off]… [--rounds 2] [--output FILE]

Requests with random prompts come at once, half of them light and half heavy, in an order that is drawn. A side is
a `--prefill-order`, with a driver of its own; the sides take turns.

- `first_s`, `light_first_s`, `heavy_first_s`: mean time to the first token, in seconds; `first_p90_s`.
- `whole_s`: mean time to the last token.
- `seconds`: until the last request has ended.
- `chunks`: that several prompts may fill, with the tokens of a mean one.
- `same`: whether all answers have the tokens of the first side.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from benchmarks.reports import deliver
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from runtime.config import PrefillOrder
from runtime.types import SamplingParams, SequenceRequest
from zoo.api import Zoo

_KINDS = ("light", "heavy")
#: Tokens of each sequence.
Answers = dict[str, list[int | None]]


def make_requests(model: str, args: argparse.Namespace) -> list[SequenceRequest]:
    """Return the requests, named by their class."""
    rng = random.Random(args.seed)

    def one(number: int) -> SequenceRequest:
        kind = "light" if number % 2 else "heavy"
        low, high = (int(each) for each in getattr(args, kind).split(","))
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randint(low, high)))
        name = f"{kind} {number}"
        return SequenceRequest(name, name, model, prompt, SamplingParams(args.tokens, ignore_eos=True))

    requests = [one(number) for number in range(args.requests)]
    rng.shuffle(requests)
    return requests


def run(zoo: Zoo, model: str, side: str, args: argparse.Namespace) -> tuple[dict[str, Any], Answers]:
    """Return the figures of one side, and its answers."""
    driver = start_driver(zoo, ServeOptions(prefill_order=side), choose(zoo, [model]))
    try:
        warm = SequenceRequest("warm", "warm", model, tuple(range(600)), SamplingParams(8, ignore_eos=True))
        for _ in driver.run([warm]):
            pass
        answers: Answers = {}
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        before, begin = driver.state().counters, time.monotonic()
        for event in driver.run([replace(one, arrival=time.monotonic_ns()) for one in make_requests(model, args)]):
            last[event.seq] = time.monotonic() - begin
            first.setdefault(event.seq, last[event.seq])
            answers.setdefault(event.seq, []).append(event.token)
        counters = driver.state().counters
    finally:
        driver.shutdown()
    chunks = counters.prompt_chunks - before.prompt_chunks
    filled = counters.prompt_chunk_tokens - before.prompt_chunk_tokens
    figures = {
        "first_s": _mean(first.values()),
        "first_p90_s": round(statistics.quantiles(first.values(), n=10)[-1], 2),
        **{f"{kind}_first_s": _mean(at for seq, at in first.items() if seq.startswith(kind)) for kind in _KINDS},
        "whole_s": _mean(last.values()),
        "seconds": round(max(last.values()), 2),
        "chunks": [chunks, round(filled / max(chunks, 1))],
    }
    return figures, answers


def _mean(times: Any) -> float:
    return round(statistics.mean(times), 2)


def measure(zoo: Zoo, model: str, sides: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return each side's figures, one list entry per round."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    expected: Answers | None = None
    for turn in range(args.rounds):
        for side in sides if turn % 2 == 0 else tuple(reversed(sides)):
            figures, answers = run(zoo, model, side, args)
            expected = expected or answers
            found[side].append({**figures, "same": answers == expected})
            print(side, found[side][-1], flush=True)
    return {"sides": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--light", default="8,32", help="least and most tokens of a light prompt")
    parser.add_argument("--heavy", default="513,900")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--side", action="append", choices=get_args(PrefillOrder))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with Zoo(args.store, create=False) as zoo:
        deliver(measure(zoo, zoo.model(args.model).name, args.side or get_args(PrefillOrder), args), args.output)


if __name__ == "__main__":
    main()
