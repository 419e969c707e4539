"""Time decode steps of free rows, with and without rows by a schema beside them, in one engine and in short turns.

    python -m benchmarks.serving.constrained.steps STORE MODEL [--rounds 60] [--batch 16] [--tokens 32] [--output FILE]

A round runs each side once, in random order: all rows free, the same again (the control, which shows the noise), half
of the rows by a schema, all of them. All rows of a side decode together, so that a step takes as long for each of them;
a turn in which they do not begin together, since a grammar was not ready, is taken again.
Counted are the steps between every row's first and last token but one; prompts, checks of grammars and HTTP are not.
Reported are medians of the rounds' ratios to the free side with 95 % intervals (bootstrap), and the processor time of
each thread per step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports import deliver
from benchmarks.serving.constrained.schemas import ENDLESS
from cli.serving.models import Chosen
from cli.serving.one_device import start_one_device
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import EngineConfig
from runtime.grammars.sources import from_schema
from runtime.types import SamplingParams, SequenceRequest
from zoo.api import Zoo

#: Tokens of a prompt, and ids that they are of: small models of tests have them, too.
_PROMPT, _IDS = 16, (3, 300)
#: Turns of one side after which it is given up that its rows begin together.
_TRIES = 5
_RESAMPLED = 2000
_numbers = count()


@dataclass(frozen=True)
class StepCost:
    """Milliseconds per step by the clock, and of the processor by thread."""

    step: float
    processor: Mapping[str, float]


def take_turn(driver: ClusterDriver, model: str, free: int, bound: int, tokens: int, temperature: float) -> StepCost:
    """Run rows together to the end. Raises RuntimeError where one ends before its tokens, or never begins with the
    rest.
    """
    for _ in range(_TRIES):
        if (found := _one_turn(driver, model, free, bound, tokens, temperature)) is not None:
            return found
    raise RuntimeError(f"the rows did not begin together in {_TRIES} turns")


def _one_turn(
    driver: ClusterDriver, model: str, free: int, bound: int, tokens: int, temperature: float
) -> StepCost | None:
    """Return the cost of a turn; None if its rows did not begin together."""
    rows = free + bound
    prompts = torch.randint(*_IDS, (rows, _PROMPT), generator=torch.Generator().manual_seed(rows)).tolist()
    grammar = from_schema(ENDLESS)
    requests = [
        SequenceRequest(
            name := f"s{next(_numbers)}", name, model, tuple(prompt),
            SamplingParams(tokens, temperature, seed=row, ignore_eos=row < free, grammar="" if row < free else grammar),
        )
        for row, prompt in enumerate(prompts)
    ]  # fmt: skip
    seen: Counter[int] = Counter()
    began = ended = 0.0
    before: Mapping[str, float] = {}
    together = False
    for event in driver.run(requests):
        seen[event.index] += event.token is not None
        if event.index == 0 and seen[0] == rows:
            began, before = time.perf_counter(), processor_times()
            together = not seen[1]
        if event.index == tokens - 2 and seen[tokens - 2] == rows:
            ended, after = time.perf_counter(), processor_times()
    if not seen[tokens - 1] == rows:
        raise RuntimeError(f"{seen[tokens - 1]} of {rows} answers have {tokens} tokens")
    if not together:
        return None
    steps = (tokens - 2) / 1000
    used = {name: (seconds - before.get(name, 0.0)) / steps for name, seconds in after.items()}
    return StepCost((ended - began) / steps, used)


def processor_times() -> dict[str, float]:
    """Return the processor seconds of this process's threads by name; those of libraries together, as `native`."""
    names = {each.native_id: each.name for each in threading.enumerate()}
    found: dict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        found[names.get(int(task.name), "native")] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Return the median with the bounds of its 95 % interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLED))
    low, high = medians[_RESAMPLED // 40], medians[-_RESAMPLED // 40]
    return {"median": round(statistics.median(ratios), 4), "low": round(low, 4), "high": round(high, 4)}


def measure(
    driver: ClusterDriver, model: str, batch: int, tokens: int, rounds: int, temperature: float
) -> dict[str, Any]:
    """Return the report of one temperature."""
    half = batch // 2
    sides = {"free": (batch, 0), "control": (batch, 0), "mixed": (batch - half, half), "bound": (0, batch)}
    draw = random.Random(0)
    taken: dict[str, list[StepCost]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in draw.sample(list(sides), len(sides)):
            turn = take_turn(driver, model, *sides[side], tokens, temperature)
            if number:  # the first round is a warm-up
                taken[side].append(turn)
    free = taken["free"]
    threads = {name for turns in taken.values() for turn in turns for name in turn.processor}
    return {
        "step_ms": {side: round(statistics.median(turn.step for turn in turns), 2) for side, turns in taken.items()},
        "ratio": {
            side: interval([mine.step / its.step for mine, its in zip(turns, free, strict=True)])
            for side, turns in taken.items()
            if side != "free"
        },
        "ratio_of_processor_times": {
            side: interval([_total(mine) / _total(its) for mine, its in zip(turns, free, strict=True)])
            for side, turns in taken.items()
            if side != "free"
        },
        "processor_ms_per_step": {
            name: {
                side: round(statistics.mean(turn.processor.get(name, 0.0) for turn in turns), 3)
                for side, turns in taken.items()
            }
            for name in sorted(threads)
        },
    }


def _total(turn: StepCost) -> float:
    return sum(turn.processor.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with (
        Zoo(given.store, create=False) as zoo,
        start_one_device(
            zoo, EngineConfig(kv_cache_memory_bytes=256 << 20), Chosen((given.model,), ()), prefix_caching="off"
        ) as driver,
    ):
        parts = {
            f"temperature {heat}": measure(driver, given.model, given.batch, given.tokens, given.rounds, heat)
            for heat in given.temperature
        }
    deliver({"batch": given.batch, "tokens": given.tokens, "rounds": given.rounds, **parts}, given.output)


if __name__ == "__main__":
    main()
