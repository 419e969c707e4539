"""Measure forecasts of requests beside what they took, on the real engine under load (QL-14 to QL-16).

    python -m benchmarks.queue.forecasts STORE MODEL… [--mix narrow|wide|two]… [--arrivals waves|poisson]
        [--requests 800] [--places 16] [--prompt 48] [--wave 100] [--log FOLDER] [--outcomes FILE] [--output FILE]
    python -m benchmarks.queue.forecasts --replay LOG… [--places 16] [--output FILE]

Requests arrive in waves, each when at most half of the last one still waits, or one by one at random times, alternately
faster and slower than they end (`benchmarks.queue.arrivals`); either way the queue grows and shrinks. All have one SLO,
so that they run in their order of arrival. How long an answer gets is not told to the server: its `max_tokens` is 512,
and a stop token ends it at a length of the mix. The first three eighths, for learning, are left out.

- `r2`, `slope`: of the measured over the forecast waiting times, from arrival to start, by least squares.
- `end_r2`, `end_slope`: the same from arrival to end, which also depends on the request's own length.
- `bias`: sum of the forecasts over the sum of what was measured, less 1, from arrival to end, by tenth of forecasts.
- `covered`: share of the requests that ended within their bounds of 95 %; `covered_error`: its standard error, from
  the shares of waves, since requests that wait together have errors in common.
- `shuffled`: the same with the forecasts of other requests: the negative control.
- `oracle`: the same formula for the wait, told afterwards how long every answer gets, and what a start and a token took
  on average: what is missing there is due to the formula and to the times of steps, the rest to lengths that are not
  known before.

`--outcomes`: every forecast with its outcome, as a line of JSON. `--log`: the scheduler's log of each mix; with
`--replay` a new scheduler gets its events, so that estimators can be compared on one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import accumulate
from math import nan, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, get_args

from benchmarks.queue.arrivals import Arrivals, Submission
from benchmarks.reports import deliver
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from runtime.policy.slo.forecast import Occupancy, Queued, forecast
from runtime.scheduler.observe.replay_log import replay
from runtime.scheduler.order.forecasts import ForecastOutcome
from runtime.scheduler.scheduler import Scheduler
from runtime.types import SamplingParams, SequenceRequest
from zoo.api import Zoo

MIXES: Mapping[str, Callable[[random.Random], int]] = {
    "narrow": lambda rng: rng.randint(28, 36),
    "wide": lambda rng: rng.randint(4, 100),
    "two": lambda rng: rng.choice((8, 8, 8, 100)),
}
_MOST = 512
_STOP = 3
_SLO_MS = 3_600_000
#: Seconds after which the latest outcomes are copied: fewer end meanwhile than a scheduler keeps.
_LOOK = 5.0


def ask(rng: random.Random, name: str, model: str, prompt: int, tokens: int, vocab: int) -> SequenceRequest:
    """Return a request that ends after so many tokens, by a stop token that is always the likeliest."""
    sampling = SamplingParams(
        _MOST, min_tokens=tokens, stop_token_ids=(_STOP,), logit_bias=((_STOP, 100.0),), ignore_eos=True
    )
    tokens_in = tuple(rng.randrange(vocab) for _ in range(prompt))
    return SequenceRequest(name, name, model, tokens_in, sampling, slo_ms=_SLO_MS, arrival=time.monotonic_ns())


def run(driver: Any, models: Sequence[str], args: argparse.Namespace, mix: str) -> list[ForecastOutcome]:
    """Run the requests of a mix, and return their forecasts with outcomes in the order of their ends."""
    rng, times = random.Random(f"{mix} {args.seed}"), random.Random(f"times {mix} {args.seed}")

    def one(number: int) -> SequenceRequest:
        tokens = MIXES[mix](rng)
        return ask(rng, f"{mix}{number}", models[number % len(models)], args.prompt, tokens, args.vocab)

    found: dict[str, ForecastOutcome] = {}

    async def keep() -> None:
        """Copy the latest outcomes before the scheduler forgets them."""
        while True:
            found.update((each.seq, each) for each in driver.view.forecasts() if each.seq not in found)
            await asyncio.sleep(_LOOK)

    async def submit() -> None:
        looks = asyncio.create_task(keep())
        await Submission(driver, one, args.requests, args.places, args.wave, times).run(args.arrivals)
        looks.cancel()

    asyncio.run(submit())
    return list({**found, **{each.seq: each for each in driver.view.forecasts()}}.values())


def replayed(log: Path) -> list[ForecastOutcome]:
    """Give the events of a scheduler's log to a new scheduler, and return its forecasts with their outcomes."""
    found: list[ForecastOutcome] = []

    def made(scheduler: Scheduler) -> None:
        if scheduler.order is not None:
            scheduler.order.forecasts.outcomes = found  # type: ignore[assignment]  # all of them

    replay(log, made=made)
    return found


def fit(told: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """Return R² and slope of the line through these points, by least squares."""
    x, y = mean(told), mean(measured)
    slope = sum((a - x) * (b - y) for a, b in zip(told, measured, strict=True)) / sum((a - x) ** 2 for a in told)
    rest = sum((b - y - slope * (a - x)) ** 2 for a, b in zip(told, measured, strict=True))
    return round(1 - rest / sum((b - y) ** 2 for b in measured), 4), round(slope, 3)


def figures(found: Sequence[ForecastOutcome], wave: int) -> dict[str, Any]:
    told, took = [each.forecast.end / 1e9 for each in found], [each.took / 1e9 for each in found]
    r2, slope = fit([each.forecast.wait / 1e9 for each in found], [each.waited / 1e9 for each in found])
    end_r2, end_slope = fit(told, took)
    tenths = sorted(zip(told, took, strict=True))
    size = max(1, len(tenths) // 10)
    share, error = covered(found, wave)
    parts = [tenths[at : at + size] for at in range(0, size * 10, size)]
    return {
        "requests": len(found),
        "r2": r2,
        "slope": slope,
        "end_r2": end_r2,
        "end_slope": end_slope,
        "bias": [round(sum(a for a, _ in part) / sum(b for _, b in part) - 1, 3) for part in parts],
        "covered": round(share, 4),
        "covered_error": round(error, 4),
        "seconds": [round(min(took), 2), round(max(took), 2)],
    }


def covered(found: Sequence[ForecastOutcome], wave: int) -> tuple[float, float]:
    """Return the share of requests that ended within their bounds, and its standard error over waves of this size."""
    within = [each.forecast.least <= each.took <= each.forecast.most for each in sorted(found, key=lambda x: x.arrived)]
    shares = [mean(within[at : at + wave]) for at in range(0, len(within) - wave + 1, wave)]
    return mean(within), stdev(shares) / sqrt(len(shares)) if len(shares) > 1 else nan


def shuffled(found: Sequence[ForecastOutcome], seed: int) -> list[ForecastOutcome]:
    """Return the outcomes, each with the forecast of another request."""
    told = [each.forecast for each in found]
    random.Random(seed).shuffle(told)
    return [replace(each, forecast=other) for each, other in zip(found, told, strict=True)]


def oracle(found: Sequence[ForecastOutcome], places: int) -> list[ForecastOutcome]:
    """Return the outcomes with forecasts of their waits from the lengths of all answers, the queue of each arrival."""
    begin, token = _line([each.tokens for each in found], [each.took - each.waited for each in found])
    order = sorted(found, key=lambda each: each.arrived + each.waited)
    starts = [each.arrived + each.waited for each in order]
    work = [begin + each.tokens * token for each in order]
    firsts, seconds = list(accumulate(work, initial=0.0)), list(accumulate((x * x for x in work), initial=0.0))
    longest, told = max(each.took - each.waited for each in found), {}
    for at, own in enumerate(order):
        now, running = own.arrived, []
        low, high = bisect_left(starts, now - longest), bisect_left(starts, now)
        for each, start, whole in zip(order[low:high], starts[low:high], work[low:high], strict=True):
            if (end := each.arrived + each.took) > now:
                running.append(Occupancy(whole * (end - now) / max(end - start, 1)))
        count = max(at - high, 0)  # in order of arrival
        ahead = Queued(count, firsts[high + count] - firsts[high], 0.0, seconds[high + count] - seconds[high])
        told[own.seq] = replace(own, forecast=forecast(running, ahead, Occupancy(work[at]), places))
    return [told[each.seq] for each in found]


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return intercept and slope of the line through these points, by least squares."""
    a, b = mean(x), mean(y)
    spread = sum((each - a) ** 2 for each in x)
    slope = sum((one - a) * (other - b) for one, other in zip(x, y, strict=True)) / spread if spread else 0.0
    return b - slope * a, slope


def measured(found: Sequence[ForecastOutcome], args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run."""
    first = 3 * len(found) // 8
    kept = found[first:]
    return {
        **figures(kept, args.wave),
        "shuffled": figures(shuffled(kept, args.seed), args.wave),
        "oracle": figures(oracle(found, args.places)[first:], args.wave),
    }


def live(args: argparse.Namespace) -> dict[str, Any]:
    """Run the mixes on the engine, and return the figures of each."""
    document = {}
    with Zoo(args.store, create=False) as zoo:
        models = [zoo.model(name).name for name in args.models]
        for mix in args.mix or tuple(MIXES):
            options = ServeOptions(plan="edf", max_num_seqs=args.places, kv_cache_memory_bytes=1 << 30)
            with ExitStack() as stack:
                log = None
                if args.log is not None:
                    log = stack.enter_context((args.log / f"{mix}.log").open("wb")).write
                driver = stack.enter_context(start_driver(zoo, options, choose(zoo, models), log=log))
                found = run(driver, models, args, mix)
            if args.outcomes is not None:
                with args.outcomes.open("a") as file:
                    file.writelines(json.dumps({"mix": mix, **asdict(each)}) + "\n" for each in found)
            document[mix] = measured(found, args)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, nargs="?")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--mix", action="append", choices=tuple(MIXES))
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--arrivals", choices=get_args(Arrivals), default="waves")
    parser.add_argument("--wave", type=int, default=100, help="requests of a wave, or the most that wait")
    parser.add_argument("--vocab", type=int, default=1000, help="prompt tokens are below")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="folder for the scheduler's log of each mix")
    parser.add_argument("--replay", type=Path, nargs="+", help="instead of a run: logs of runs")
    parser.add_argument("--outcomes", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.replay:
        document = {log.name: measured(replayed(log), args) for log in args.replay}
    else:
        document = live(args)
    deliver(document, args.output)


if __name__ == "__main__":
    main()
