"""The agents of `benchmarks.cluster.hops`: as `cli.serving.agent_engines`, and they write down when their engine began
with a step and when it was through.

A file per process, in the folder that the environment names (`STAMPS`), once it ends: [begin, end] in nanoseconds of
the monotonic clock, which is one for all processes of a machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cli.serving.agent_engines import ENGINES
from runtime.chains import Array, StageEngine, StageResult
from runtime.cluster.agent_process.main import Engines, MakeEngine, main
from runtime.types import StepPlan

STAMPS = "ZOO_BENCHMARK_STAMPS"


def stamped(make: Callable[[], StageEngine], stamps: list[tuple[int, int]]) -> MakeEngine:
    """An engine whose steps are written down."""

    def made() -> StageEngine:
        engine = make()
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
