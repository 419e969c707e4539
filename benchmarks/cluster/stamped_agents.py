"""The agents of `benchmarks.cluster.hops`: those of `cli.serving.agent_engines` with timestamps of each engine step.

Each process writes one file at its end, in the folder given by the environment variable `STAMPS`: pairs [begin, end] in
nanoseconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli.serving.agent_engines import ENGINES
from runtime.chains import Array, StageEngine, StageResult
from runtime.cluster.agent_process.main import Engines, MakeEngine, main
from runtime.types import StepPlan

STAMPS = "ZOO_BENCHMARK_STAMPS"


def stamped(make: MakeEngine, stamps: list[tuple[int, int]]) -> MakeEngine:
    """Return a factory of engines that record begin and end of their steps in `stamps`."""

    def made(device: str) -> StageEngine:
        engine = make(device)
        run = engine.run

        def timed(plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
            begin = time.monotonic_ns()
            result = run(plan, inputs)
            stamps.append((begin, time.monotonic_ns()))
            return result

        engine.run = timed  # type: ignore[method-assign]
        return engine

    return made


def _staged(stamps: list[tuple[int, int]]) -> Engines:
    def prepared(settings: Mapping[str, Any]) -> MakeEngine:
        return stamped(ENGINES["staged"](settings), stamps)

    return {"staged": prepared}


if __name__ == "__main__":
    kept: list[tuple[int, int]] = []
    code = main(_staged(kept))
    (Path(os.environ[STAMPS]) / f"{os.getpid()}.json").write_text(json.dumps(kept))
    sys.exit(code)
