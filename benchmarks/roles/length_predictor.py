"""Measure what predicting lengths costs the prompts beside which it runs (TI-13, Figure 17).

    python -m benchmarks.roles.length_predictor STORE MODEL [--agents 1] [--prompts 40,400] [--requests 24]
        [--burst 16] [--rounds 5] [--output FILE]

MODEL has a predictor (`zoo lengths MODEL`). Sides are `off`, `parallel` and `sequential`, each with a driver of its own
that stays; they take turns in every round. `alone`: time to the first token of requests one after another, median of a
round. `burst`: mean time to the first token of so many requests that come at once. Each with its ratio to `off` of the
same round: median, least, greatest. `predict_ms`: the predictor's time per prompt, over all of it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from runtime.cluster.driver.driver import ClusterDriver
from runtime.types import SamplingParams, SequenceRequest
from zoo.api import Zoo

SIDES = ("off", "parallel", "sequential")


class FirstTokens:
    """Times to first tokens of one driver."""

    def __init__(self, driver: ClusterDriver, model: str) -> None:
        self.driver, self._model, self._rng, self._number = driver, model, random.Random(0), 0

    def first_tokens(self, count: int, tokens: int) -> list[float]:
        """Return the seconds until each of so many requests at once had its first token, which is its only one."""
        requests = []
        for _ in range(count):
            self._number += 1
            prompt = tuple(self._rng.randrange(300, 4000) for _ in range(tokens))
            name = f"r{self._number}"
            requests.append(SequenceRequest(name, name, self._model, prompt, SamplingParams(1)))
        begin = time.perf_counter()
        return [time.perf_counter() - begin for _ in self.driver.run(requests)]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def measured(zoo: Zoo, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all sides."""
    name = zoo.model(model).name
    chosen = choose(zoo, [name])
    sides: dict[str, FirstTokens] = {}
    try:
        for side in SIDES:
            made = ServeOptions(agents=args.agents, lengths=side, decode_admission="peak")
            sides[side] = FirstTokens(start_driver(zoo, made, chosen), name)
            sides[side].first_tokens(4, 40)
        found: dict[str, Any] = {}
        for tokens in (int(each) for each in args.prompts.split(",")):
            alone: dict[str, list[float]] = {side: [] for side in SIDES}
            burst: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(args.rounds):
                for side in SIDES[number % 3 :] + SIDES[: number % 3]:
                    each = sides[side]
                    alone[side].append(statistics.median(each.first_tokens(1, tokens)[0] for _ in range(args.requests)))
                    burst[side].append(statistics.mean(each.first_tokens(args.burst, tokens)))
            found[str(tokens)] = {
                side: {
                    what: {
                        "ms": statistics.median(times[side]) * 1000,
                        "ratio": spread([one / off for one, off in zip(times[side], times["off"], strict=True)]),
                    }
                    for what, times in (("alone", alone), ("burst", burst))
                }
                for side in SIDES
            }
        threads = [each.driver.lengths for each in sides.values() if each.driver.lengths is not None]
        found["predict_ms"] = statistics.mean(each.seconds / max(each.predicted, 1) * 1000 for each in threads)
        return found
    finally:
        for each in sides.values():
            each.driver.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--prompts", default="40,400", help="tokens of the prompts")
    parser.add_argument("--requests", type=int, default=24, help="requests one after another in a round")
    parser.add_argument("--burst", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    with Zoo(given.store, create=False) as zoo:
        deliver(measured(zoo, given.model, given), given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
