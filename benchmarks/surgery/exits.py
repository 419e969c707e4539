"""Measure what early exits (BL-30) cost in accuracy and gain in speed, on the demo's tiny foundation.

    python -m benchmarks.surgery.exits [--dir FOLDER] [--steps 440] [--batch 8] [--tokens 96] [--rounds 3]

The foundation is trained first; one trained into FOLDER with the same settings is reused. Held-out text of the built-in
corpus is scored at every depth (`zoo exits`). Then tokens per second of decoding are measured in one engine that serves
the whole model and all its exits: each depth alone, and the whole model together with one exit. Rounds take the depths
in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.reports import deliver
from cli.demo.lessons import LibraryCurriculum
from cli.demo.members import learn
from cli.demo.recipe import TINY
from cli.serving.models import Chosen
from cli.serving.one_device import start_one_device
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import EngineConfig
from runtime.types import SamplingParams, SequenceRequest
from surgery.chains.exits import make_exit, measure
from surgery.text.library import read_library
from zoo.api import Zoo

_PROMPT = 32


def trained(folder: Path, steps: int) -> Path:
    """Return the folder of the recipe's foundation after `steps` steps; it exists only once training is complete."""
    made, partial = folder / f"tiny-base-{steps}", folder / f"tiny-base-{steps}.partial"
    if not made.exists():
        member = TINY.members[0]
        member = replace(member, schedule=replace(member.schedule, steps=steps))
        lesson = LibraryCurriculum(TINY, read_library()).prepare_lesson(member)
        learn(lesson, partial, None, lambda step, loss: None)
        partial.rename(made)
    return made


def speed(driver: ClusterDriver, names: Sequence[str], batch: int, tokens: int) -> float:
    """Return tokens per second of `batch` sequences, spread over the models in turn."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [
        SequenceRequest(
            f"{at}-{time.monotonic_ns()}", "r", names[at % len(names)], tuple(range(5 + at, 5 + at + _PROMPT)), params
        )
        for at in range(batch)
    ]
    begin = time.perf_counter()
    count = sum(event.token is not None for event in driver.run(requests))
    return count / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--dir", type=Path, default=Path("zoo_exits"))
    parser.add_argument("--steps", type=int, default=440)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    begin = time.perf_counter()
    with Zoo(args.dir / "store") as zoo:
        name = f"tiny-base-{args.steps}"
        zoo.ingest(trained(args.dir, args.steps), name)
        model = zoo.model(name)
        training = time.perf_counter() - begin
        found = measure(zoo.store, model)
        depth = found.exits[-1].layers
        names = [make_exit(zoo.store, model, layers).model for layers in range(1, depth)]
        cases = {one: [one] for one in (*names, name)}
        cases["whole and half"] = [name, names[depth // 2 - 1]]
        speeds: dict[str, list[float]] = {case: [] for case in cases}
        with start_one_device(
            zoo, EngineConfig(kv_cache_memory_bytes=64 << 20), Chosen((name, *names), ()), prefix_caching="off"
        ) as driver:
            for _ in range(args.rounds + 1):  # the first round is a warm-up
                for case, some in cases.items():
                    speeds[case].append(speed(driver, some, args.batch, args.tokens))
            weights = driver.memory().weights
    deliver(
        {
            **found.document(),
            "steps": args.steps,
            "training_seconds": round(training, 1),
            "weights": weights,
            "batch": args.batch,
            "tokens_per_second": {case: round(statistics.median(each[1:]), 1) for case, each in speeds.items()},
        },
        args.output,
    )


if __name__ == "__main__":
    main()
