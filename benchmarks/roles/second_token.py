"""Measure the wait for the second token: sequences that rest until their hand-off beside ones that decode meanwhile.

    python -m benchmarks.roles.second_token STORE MODEL [--prompts 64,512,1500] [--requests 6] [--rounds 3]

Two agent processes with `--roles prefill,decode`. `rest` and `decode` are the values of `--until-handoff`. Answers come
one after another, alone and beside a stream of prompts of other requests (`beside`). `second_ms`: from the first token
to the second; `longest_ms`: the longest time between two tokens of an answer; `answer_ms`: from the request to the last
token. Medians of the rounds' medians; `ratio`: `decode` by `rest`, by round.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from benchmarks.roles.prompts_beside_decodes import PromptStream
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from runtime.cluster.driver.driver import ClusterDriver
from runtime.types import SamplingParams, SequenceRequest
from zoo.api import Zoo

SIDES = ("rest", "decode")
_TOKENS = 24


def answer(driver: ClusterDriver, model: str, length: int, number: int) -> tuple[float, float, float]:
    """Return the milliseconds from the first token to the second, the longest gap, and those of the whole answer."""
    prompt = tuple(300 + (number * 131 + length + at * 11) % 4000 for at in range(length))
    name, begun = f"s{time.monotonic_ns()}", time.perf_counter()
    times: list[float] = []
    for event in driver.run([SequenceRequest(name, name, model, prompt, SamplingParams(_TOKENS, ignore_eos=True))]):
        if event.error is not None:
            raise RuntimeError(event.error)
        times.append(time.perf_counter())
    gaps = [(later - earlier) * 1000 for earlier, later in itertools.pairwise(times)]
    return gaps[0], max(gaps), (times[-1] - begun) * 1000


def one_round(
    driver: ClusterDriver, model: str, length: int, beside: bool, requests: int, first: int
) -> tuple[float, float, float]:
    """Return the medians of `answer` for some requests, alone or beside a stream of prompts."""
    with PromptStream(driver, model, 512, 1) if beside else nullcontext():
        got = [answer(driver, model, length, first + at) for at in range(requests)]
    second, longest, whole = (statistics.median(column) for column in zip(*got, strict=True))
    return second, longest, whole


def measured(zoo: Zoo, model: str, lengths: Sequence[int], requests: int, rounds: int) -> dict[str, Any]:
    """Return the figures by load, length of the prompt, and side."""
    name = zoo.model(model).name
    chosen = choose(zoo, [name])
    kinds = [(beside, length) for beside in (False, True) for length in lengths]
    got: dict[tuple[bool, int, str], list[tuple[float, float, float]]] = {}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            options = ServeOptions(agents=2, backend="processes", roles="prefill,decode", until_handoff=side)
            with start_driver(zoo, options, chosen) as driver:
                one_round(driver, name, lengths[0], False, 2, 0)  # loads what both kinds of paths need
                for at, (beside, length) in enumerate(kinds):
                    first = (number * len(kinds) + at) * requests + 10
                    took = one_round(driver, name, length, beside, requests, first)
                    got.setdefault((beside, length, side), []).append(took)
    found: dict[str, Any] = {}
    for beside, length in kinds:
        row: dict[str, Any] = {}
        for at, what in enumerate(("second_ms", "longest_ms", "answer_ms")):
            rest, decode = ([each[at] for each in got[beside, length, side]] for side in SIDES)
            ratios = [one / other for one, other in zip(decode, rest, strict=True)]
            row[what] = {
                "rest": statistics.median(rest),
                "decode": statistics.median(decode),
                "ratio": {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)},
            }
        found[f"{'beside' if beside else 'alone'} {length}"] = row
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--prompts", default="64,512,1500", help="tokens of prompts")
    parser.add_argument("--requests", type=int, default=6, help="answers of each kind and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    lengths = [int(each) for each in given.prompts.split(",")]
    with Zoo(given.store, create=False) as zoo:
        deliver(measured(zoo, given.model, lengths, given.requests, given.rounds), given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
