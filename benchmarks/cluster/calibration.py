"""Compare the scheduler's estimates of hops, moves and loads with what was measured, on real agents (BL-16, BL-21).

    python -m benchmarks.cluster.calibration --store STORE [--kind KIND]... [--models N] [--rounds 40] [--seed 0]
        [--output FILE]

The scheduler estimates each hop, move and load before it happens, from what it has learned, and traces the estimate
beside the outcome (`estimate`). This program only makes them happen, with the options that `zoo serve` ships, and reads
the trace:

- `hop`: two agents in processes, the first model cut over them; prompts of 8 to 480 tokens, answers of 24.
- `move`: two agents with the whole model each; running sequences of 32 to 1,500 tokens are moved from one to the other.
- `load`: one agent with room for two of the store's models, which are asked for at random.

Printed for each kind: how many, the first `--learning` of them left out; the median of the relative error; and the
median estimate over the median time for each tenth of them, by estimate and by measured time. Tenths by estimate are
the fair test: what is estimated alike should take as long on average. By measured time, the longest of equal operations
are in the last tenth, whatever was estimated. `spread`: the median error that an estimate without bias would have, the
median of the measured times in each tenth by estimate.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from cli.serving.driver import start_driver
from cli.serving.models import Chosen
from cli.serving.options import ServeOptions
from runtime.bench.drive import WallClock
from runtime.bench.inside import DriverClient
from runtime.bench.workload import WorkloadRequest
from runtime.cluster.driver.driver import ClusterDriver
from runtime.heap import settle_heap
from runtime.types import SamplingParams, SequenceRequest, TraceEvent
from zoo.api import Zoo

_VOCABULARY = 8000


class Estimates:
    """A trace sink that keeps estimates with their outcomes, in seconds."""

    def __init__(self) -> None:
        self.pairs: dict[str, list[tuple[float, float]]] = {}

    def emit(self, event: TraceEvent) -> None:
        if event.ev == "estimate":
            pair = event.extra["seconds"], event.extra["measured"]
            self.pairs.setdefault(event.extra["of"], []).append(pair)


def table(pairs: Sequence[tuple[float, float]], learning: int) -> dict[str, Any]:
    """Return the figures of one kind of estimates."""
    kept = pairs[learning:]
    if not kept:
        return {"count": 0}
    by_estimate = _tenths(kept, 0)
    return {
        "count": len(kept),
        "median_ms": round(1000 * statistics.median(measured for _, measured in kept), 3),
        "median_error": round(statistics.median(abs(estimate / measured - 1) for estimate, measured in kept), 3),
        "bias": round(statistics.median(estimate / measured for estimate, measured in kept) - 1, 3),
        "spread": round(statistics.median(each for some in by_estimate for each in _deviations(some)), 3),
        "tenths_by_estimate": [_tenth(each) for each in by_estimate],
        "tenths_by_measured": [_tenth(each) for each in _tenths(kept, 1)],
    }


def _tenths(pairs: Sequence[tuple[float, float]], by: int) -> list[list[tuple[float, float]]]:
    """Return the tenths of the pairs (estimate, measured), in the order of their element `by`."""
    ordered = sorted(pairs, key=lambda pair: pair[by])
    parts = (ordered[len(ordered) * at // 10 : len(ordered) * (at + 1) // 10] for at in range(10))
    return [each for each in parts if each]


def _deviations(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return how far the median of the measured times is from each of them, relative to it."""
    middle = statistics.median(measured for _, measured in pairs)
    return [abs(middle / measured - 1) for _, measured in pairs]


def _tenth(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    estimate, measured = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"measured_ms": round(1000 * measured, 3), "estimate_over_measured": round(estimate / measured, 3)}


def ask(driver: ClusterDriver, asks: Sequence[WorkloadRequest], clients: int) -> None:
    """Send requests, `clients` at a time. Raises RuntimeError if one fails."""

    async def run() -> None:
        client, gate = DriverClient(driver, WallClock()), asyncio.Semaphore(clients)

        async def one(each: WorkloadRequest) -> None:
            async with gate:
                answer = await client.send_request(each)
                if answer.error is not None:
                    raise RuntimeError(f"{each.model}: {answer.detail}")

        await asyncio.gather(*map(one, asks))

    asyncio.run(run())


def prompts(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(300, _VOCABULARY) for _ in range(length))


def hops(driver: ClusterDriver, model: str, rounds: int, draw: random.Random) -> None:
    """Run prompts and answers over both agents, one to four at a time."""
    for turn in range(rounds):
        lengths = [draw.choice((8, 32, 120, 480)) for _ in range(4)]
        asks = [WorkloadRequest(at, 0.0, model, prompts(draw, length), 24) for at, length in enumerate(lengths)]
        ask(driver, asks, 1 + turn % 4)
        time.sleep(0.3)  # agents report once in a while, and keep few hops until then


def moves(driver: ClusterDriver, model: str, rounds: int, draw: random.Random) -> None:
    """Move a running sequence from its agent to the other one, `rounds` times."""
    (chain,) = (each for each in driver.snapshot()["chains"] if each["model"] == model)
    agents = [each.device for each in driver.agents()]
    for turn in range(rounds):
        prompt, name = prompts(draw, draw.choice((32, 120, 480, 1000, 1500))), f"move-{turn}"
        request = SequenceRequest(name, name, model, prompt, SamplingParams(max_tokens=64, ignore_eos=True))
        tried = False
        for event in driver.run([request]):
            if event.token is not None and not tried:
                tried = any(driver.move(name, range(len(chain["blocks"])), agent) is None for agent in agents)


def loads(driver: ClusterDriver, models: Sequence[str], rounds: int, draw: random.Random) -> None:
    """Ask for models at random."""
    for at in range(rounds):
        ask(driver, [WorkloadRequest(at, 0.0, draw.choice(models), prompts(draw, 16), 4)], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--kind", action="append", choices=("hop", "move", "load"), help="default: all three")
    parser.add_argument("--models", type=int, default=12, help="models that are loaded in turn")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--learning", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with Zoo(args.store, create=False) as zoo:
        models = [each for each in zoo.models() if each.kind in ("foundation", "full")][: args.models]
    names, size = [each.name for each in models], max(each.bytes for each in models)
    found: dict[str, Any] = {}
    for kind, run, options, served in (
        ("hop", hops, ServeOptions(agents=2, placement="partition"), names[:1]),
        ("move", moves, ServeOptions(agents=2, placement="replicate"), names[:1]),
        ("load", loads, ServeOptions(agent_weights=int(2.2 * size), host_memory=int(4 * size)), names),
    ):
        if args.kind and kind not in args.kind:
            continue
        estimates, draw = Estimates(), random.Random(args.seed)
        driver = start_driver(Zoo(args.store, create=False), options, Chosen(tuple(served), ()), trace=estimates)
        settle_heap()  # as a server does: a full collection would be measured as part of a load beside it
        try:
            run(driver, names if kind == "load" else names[0], args.rounds, draw)  # type: ignore[operator]
            time.sleep(1.5)  # the last report
        finally:
            driver.shutdown()
        found[kind] = table(estimates.pairs.get(kind, []), args.learning)
    deliver(found, args.output)


if __name__ == "__main__":
    main()
