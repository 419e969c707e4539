"""Measure interactive requests behind a batch: strict FCFS, orders by deadline, and running answers that give way.

    python -m benchmarks.queue.head_of_line STORE MODEL… [--batch 300] [--interactive 12] [--places 16] [--prompt 64]
        [--tokens 160,240] [--answer 24] [--factor 3] [--within SECONDS] [--slo SECONDS] [--side fcfs]… [--rounds 1]
        [--roles prefill,decode] [--lending planned] [--output FILE]

A batch of requests without a deadline is queued at once. The interactive ones come one after another while it runs,
spread over `--within` seconds (default: the first two thirds of its time under the first side); each has an SLO of
`--factor` times its mean time alone, the least that was measured before (or `--slo`, to repeat one side under the same
conditions). A side is an order (`zoo serve --plan`) with a driver of its own on the real engine; `qlm-stay` is `qlm`
without eviction, `qlm-whole` is `qlm` with all rows in every step. With `--roles` a driver has an agent for each, with
`--lending` alone two. Sides take turns in each round, and each round begins with another one: where the machine's speed
changes, several rounds of small batches compare throughput better than one of a large batch.

- `met`: share of the interactive requests that ended within their SLO.
- `tokens_per_second`: of batch and interactive requests together, until the last one ended.
- `lost_tokens`: tokens that were computed again because their sequence gave way, for pages or for an urgent one.
- `alone_seconds`: mean time of an interactive request alone, before and after: how fast the machine was.
- `same`: whether every answer has the tokens of the same request on the first side.
- `throughput_ratio`: `tokens_per_second` over that of the first side in the same round, median of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from runtime.config import OrderConfig
from runtime.types import SamplingParams, SequenceRequest
from zoo.api import Zoo

SIDES: Mapping[str, Mapping[str, Any]] = {
    "off": {},
    "fcfs": {"plan": "fcfs"},
    "edf": {"plan": "edf"},
    "qlm-stay": {"plan": "qlm", "order": OrderConfig(evict=False)},
    "qlm-whole": {"plan": "qlm", "order": OrderConfig(cap_batches=False)},
    "qlm": {"plan": "qlm"},
}
#: Turns in which the time alone is measured before the first side: `qlm` compiles its search for about ten seconds.
_SETTLE = 6
#: The interactive requests come within this share of the time that the batch takes.
_SPREAD = 2 / 3


@dataclass(frozen=True, slots=True)
class LineLoad:
    """The requests: `batch` at once, `interactive` one by one."""

    batch: tuple[SequenceRequest, ...]
    interactive: tuple[SequenceRequest, ...]


@dataclass(frozen=True, slots=True)
class LineRun:
    """The result of one side.

    Fields:
        seconds: From the first request to the last token.
        took: Seconds of each interactive request, from its arrival to its end.
        answers: Tokens by sequence.
    """

    seconds: float
    took: tuple[float, ...]
    answers: Mapping[str, tuple[int, ...]]
    evictions: int
    lost_tokens: int


def make_load(models: Sequence[str], args: argparse.Namespace, turn: int = 0) -> LineLoad:
    """Return a round's random prompts over all models in turn; answers of the batch have lengths from a range."""
    rng = random.Random(args.seed if turn == 0 else f"{args.seed} {turn}")
    shortest, longest = args.tokens

    def one(name: str, number: int, tokens: int) -> SequenceRequest:
        prompt = tuple(rng.randrange(args.vocab) for _ in range(args.prompt))
        sampling = SamplingParams(tokens, ignore_eos=True)
        return SequenceRequest(name, name, models[number % len(models)], prompt, sampling)

    batch = (one(f"b{turn}.{number}", number, rng.randint(shortest, longest)) for number in range(args.batch))
    interactive = (one(f"i{turn}.{number}", number, args.answer) for number in range(args.interactive))
    return LineLoad(tuple(batch), tuple(interactive))


class OpenLine:
    """A driver with one order."""

    def __init__(self, zoo: Zoo, models: Sequence[str], side: str, args: argparse.Namespace) -> None:
        agents = len(args.roles.split(",")) if args.roles else 2 if args.lending != "off" else 1
        options = ServeOptions(
            max_num_seqs=args.places, kv_cache_memory_bytes=args.kv_mib << 20, agents=agents, roles=args.roles,
            lending=args.lending, **SIDES[side],
        )  # fmt: skip
        self._driver = start_driver(zoo, options, choose(zoo, models))
        self._alone = 0

    def close(self) -> None:
        self._driver.shutdown()

    def answer(self, one: SequenceRequest, name: str = "", slo: float | None = None) -> tuple[float, tuple[int, ...]]:
        """Return the seconds that a request takes from now, and its tokens."""
        name = name or one.seq
        slo_ms = None if slo is None else max(1, round(slo * 1000))
        begin = time.monotonic_ns()
        asked = replace(one, seq=name, request=name, arrival=begin, slo_ms=slo_ms)
        tokens = tuple(event.token for event in self._driver.run([asked]) if event.token is not None)
        return (time.monotonic_ns() - begin) / 1e9, tokens

    def alone(self, load: LineLoad, rounds: int = 3) -> float:
        """Return the mean seconds of an interactive request with nothing beside it; warms the engine up, too."""
        self._alone += 1
        self.answer(load.interactive[0], f"warm{self._alone}")
        return statistics.mean(
            self.answer(load.interactive[at % len(load.interactive)], f"alone{self._alone}.{at}")[0]
            for at in range(rounds)
        )

    def run(self, load: LineLoad, slo: float, within: float | None) -> LineRun:
        """Run the batch, with the interactive requests spread over `within` seconds; None: the batch alone."""
        answers: dict[str, list[int]] = {one.seq: [] for one in load.batch}
        took: dict[str, tuple[float, tuple[int, ...]]] = {}
        before = self._driver.state().counters
        begin = time.monotonic()

        def ask(number: int, one: SequenceRequest) -> None:
            time.sleep(
                max(0.0, begin + (within or 0.0) * (number + 1) / (len(load.interactive) + 1) - time.monotonic())
            )
            took[one.seq] = self.answer(one, slo=slo)

        asking = [
            threading.Thread(target=ask, args=each, daemon=True)
            for each in (() if within is None else enumerate(load.interactive))
        ]
        arrival = time.monotonic_ns()
        events = self._driver.run([replace(one, arrival=arrival) for one in load.batch])
        for thread in asking:
            thread.start()
        for event in events:
            if event.token is not None:
                answers[event.seq].append(event.token)
        for thread in asking:
            thread.join()
        counters = self._driver.state().counters
        return LineRun(
            time.monotonic() - begin,
            tuple(seconds for seconds, _ in took.values()),
            {
                **{seq: tuple(tokens) for seq, tokens in answers.items()},
                **{seq: tokens for seq, (_, tokens) in took.items()},
            },
            counters.evictions - before.evictions,
            counters.resumed_tokens - before.resumed_tokens,
        )


def measure(zoo: Zoo, models: Sequence[str], sides: Sequence[str], args: argparse.Namespace) -> Any:
    """Return a document with each side's figures, one list entry per round."""
    slo, within = args.slo or 0.0, args.within or 0.0
    document: dict[str, Any] = {"sides": {side: [] for side in sides}}
    with ExitStack() as stack:
        lines = {side: stack.enter_context(closing(OpenLine(zoo, models, side, args))) for side in sides}
        slo = slo or args.factor * settled_alone(list(lines.values()), make_load(models, args, args.rounds))
        for number in range(args.rounds):
            load, first = make_load(models, args, number), None
            for side in (*sides[number % len(sides) :], *sides[: number % len(sides)]):
                line = lines[side]
                before = line.alone(load)
                if not within:
                    within = _SPREAD * line.run(load, slo, None).seconds
                made = line.run(load, slo, within)
                first = first or made
                document["sides"][side].append(figures(made, first, slo, (before, line.alone(load))))
    rates = {side: [each["tokens_per_second"] for each in rounds] for side, rounds in document["sides"].items()}
    ratios = {
        side: statistics.median(own / other for own, other in zip(rates[side], rates[sides[0]], strict=True))
        for side in sides
    }
    return {
        "slo_seconds": round(slo, 3), "spread_seconds": round(within, 1), **document,
        "throughput_ratio": {side: round(ratio, 3) for side, ratio in ratios.items()},
    }  # fmt: skip


def settled_alone(lines: Sequence[OpenLine], load: LineLoad) -> float:
    """Return the least mean time alone over all sides in turns, so often that what starts beside a driver has ended."""
    return min(line.alone(load) for _ in range(_SETTLE) for line in lines)


def figures(made: LineRun, first: LineRun, slo: float, alone: tuple[float, float]) -> dict[str, Any]:
    """Return the figures of a side in a round; `alone`: seconds before and after it."""
    tokens = sum(map(len, made.answers.values()))
    return {
        "met": round(sum(seconds <= slo for seconds in made.took) / len(made.took), 3),
        "tokens_per_second": round(tokens / made.seconds, 1),
        "interactive_seconds": [round(seconds, 3) for seconds in sorted(made.took)],
        "alone_seconds": [round(seconds, 3) for seconds in alone],
        "evictions": made.evictions,
        "lost_tokens": made.lost_tokens,
        "same": made.answers == first.answers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--batch", type=int, default=300)
    parser.add_argument("--interactive", type=int, default=12)
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--roles", help="of agents: prefill,decode")
    parser.add_argument("--lending", default="off", choices=("off", "planned", "negotiated"))
    parser.add_argument("--kv-mib", type=int, default=1024, help="MiB for K and V of each agent")
    parser.add_argument("--tokens", type=lambda text: tuple(map(int, text.split(","))), default=(160, 240))
    parser.add_argument("--answer", type=int, default=24)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--within", type=float)
    parser.add_argument("--slo", type=float)
    parser.add_argument("--side", action="append", choices=tuple(SIDES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=1000, help="prompt tokens are below")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with Zoo(args.store, create=False) as zoo:
        models = [zoo.model(name).name for name in args.models]
        deliver(measure(zoo, models, args.side or ["fcfs", "edf", "qlm-stay", "qlm"], args), args.output)


if __name__ == "__main__":
    main()
