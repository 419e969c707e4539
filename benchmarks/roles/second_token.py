"""Measure the wait for the second token of answers whose prompts run elsewhere, by when their K and V travel.

    python -m benchmarks.roles.second_token STORE MODEL [--sides request,chunk,layer,decode] [--prompts 64,512,1500]
        [--requests 6] [--rounds 3] [--shared 448]

Each side has a server with two agent processes and `--roles prefill,decode`; one side works at a time. `request`,
`chunk` and `layer` are the values of `--handoff-grain`; `decode` is `request` with `--until-handoff decode`. Answers
come one after another, alone and beside a stream of prompts of other requests (`beside`). `first_ms`: from the request
to the first token; `second_ms`: from the first token to the second; `longest_ms`: the longest time between two tokens
of an answer; `answer_ms`: from the request to the last token. Medians of the rounds, and the ratios of each side
by the first one, by round. Within a round the sides take turns, so that other work on the machine disturbs all alike.

With `--shared N` and `--prefix-caching cached` all prompts are measured a second time, as prompts that have their first
N tokens in common, as those behind a system prompt: both devices have their K and V from the second answer on.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
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

#: Options of each side.
SIDES: Mapping[str, Mapping[str, str]] = {
    "request": {"handoff_grain": "request"},
    "chunk": {"handoff_grain": "chunk"},
    "layer": {"handoff_grain": "layer"},
    "decode": {"handoff_grain": "request", "until_handoff": "decode"},
}
_WHAT = ("first_ms", "second_ms", "longest_ms", "answer_ms")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of prompts. Fields: tokens; how many of them all prompts have in common; whether beside other prompts."""

    length: int
    shared: int
    beside: bool

    def __str__(self) -> str:
        return f"{'beside' if self.beside else 'alone'} {self.length}" + (f", {self.shared} shared" * bool(self.shared))

    def prompt(self, number: int) -> tuple[int, ...]:
        """Return the tokens of a prompt."""
        own = ((number if at >= self.shared else 0) * 131 + self.length + at * 11 for at in range(self.length))
        return tuple(300 + each % 4000 for each in own)


def answer(driver: ClusterDriver, model: str, prompt: tuple[int, ...], tokens: int) -> tuple[float, ...]:
    """Return the milliseconds of an answer: `_WHAT`."""
    name, begun = f"s{time.monotonic_ns()}", time.perf_counter()
    times: list[float] = []
    for event in driver.run([SequenceRequest(name, name, model, prompt, SamplingParams(tokens, ignore_eos=True))]):
        if event.error is not None:
            raise RuntimeError(event.error)
        times.append(time.perf_counter())
    gaps = [(later - earlier) * 1000 for earlier, later in itertools.pairwise(times)]
    return (times[0] - begun) * 1000, gaps[0], max(gaps), (times[-1] - begun) * 1000


def one_round(
    driver: ClusterDriver, model: str, kind: Kind, requests: int, first: int, tokens: int
) -> tuple[float, ...]:
    """Return the medians of `answer` for some requests, alone or beside a stream of prompts."""
    with PromptStream(driver, model, 512, 1) if kind.beside else nullcontext():
        got = [answer(driver, model, kind.prompt(first + at), tokens) for at in range(requests)]
    return tuple(statistics.median(column) for column in zip(*got, strict=True))


def measured(
    zoo: Zoo,
    model: str,
    sides: Sequence[str],
    kinds: Sequence[Kind],
    requests: int,
    rounds: int,
    tokens: int,
) -> dict[str, Any]:
    """Return the figures by kind of prompts, and side."""
    name = zoo.model(model).name
    chosen = choose(zoo, [name])
    got: dict[tuple[Kind, str], list[tuple[float, ...]]] = {}
    caching = {"prefix_caching": "cached"} if any(kind.shared for kind in kinds) else {}
    with ExitStack() as running:
        drivers = {
            side: running.enter_context(
                start_driver(
                    zoo,
                    ServeOptions(agents=2, backend="processes", roles="prefill,decode", **SIDES[side], **caching),
                    chosen,
                )
            )
            for side in sides
        }
        for driver in drivers.values():
            for kind in {Kind(kinds[0].length, 0, False), *kinds}:  # loads what both kinds of paths need
                one_round(driver, name, replace(kind, beside=False), 2 if kind == kinds[0] else 1, 0, tokens)
        for number in range(rounds):
            for at, kind in enumerate(kinds):
                turn, first = (number + at) % len(sides), (number * len(kinds) + at) * requests + 10
                for side in (*sides[turn:], *sides[:turn]):
                    took = one_round(drivers[side], name, kind, requests, first, tokens)
                    got.setdefault((kind, side), []).append(took)
    return {
        str(kind): {
            what: _compared({side: [each[at] for each in got[kind, side]] for side in sides})
            for at, what in enumerate(_WHAT)
        }
        for kind in kinds
    }


def _compared(values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the median of each side's rounds, and its ratios by the first side."""
    row: dict[str, Any] = {side: statistics.median(each) for side, each in values.items()}
    base, *rest = values
    for side in rest:
        ratios = [one / other for one, other in zip(values[side], values[base], strict=True)]
        row[f"{side} by {base}"] = {
            "median": statistics.median(ratios),
            "least": min(ratios),
            "greatest": max(ratios),
        }
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--sides", default="request,chunk,layer,decode", help=f"some of {', '.join(SIDES)}")
    parser.add_argument("--prompts", default="64,512,1500", help="tokens of prompts")
    parser.add_argument("--requests", type=int, default=6, help="answers of each kind and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--alone", action="store_true", help="only without other prompts")
    parser.add_argument("--shared", type=int, default=0, help="also prompts with so many tokens in common")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    sides, lengths = given.sides.split(","), [int(each) for each in given.prompts.split(",")]
    if unknown := set(sides) - SIDES.keys():
        parser.error(f"no such side: {', '.join(sorted(unknown))}")
    if given.shared and given.shared >= min(lengths):
        parser.error("prompts need tokens of their own behind those that they share")
    loads, shared = (False,) if given.alone else (False, True), (0, given.shared) if given.shared else (0,)
    kinds = [Kind(length, each, beside) for beside in loads for length in lengths for each in shared]
    with Zoo(given.store, create=False) as zoo:
        found = measured(zoo, given.model, sides, kinds, given.requests, given.rounds, given.tokens)
    deliver(found, given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
