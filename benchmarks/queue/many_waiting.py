"""Measure what orders and plans cost the scheduler while very many requests wait (QLM, 8.3: scalability and overhead).

    python -m benchmarks.queue.many_waiting [--requests 400000] [--timed 400] [--models 24] [--fit 2] [--places 64]
        [--output FILE]

A scheduler with `plan = "qlm"`, one device with room for `--fit` of the models, and no engine: the requests that run
never return a row, so all others wait. Requests for the models in turn arrive, in classes of deadlines and lengths: the
last `--timed` ones one by one, those before them in lots and without a forecast, to save time. Then ticks ask for
plans, which are solved as beside `zoo serve`, by the compiled kernel if there is numba.

- `arrival_us`: of the scheduler's thread per request, mean and maximum.
- `tick_ms`: of the scheduler's thread: reviews of the order, with the building of problems, and what follows.
- `solved_ms`: of that thread when a plan is there: repaired, judged and followed.
- `solve_seconds`: of the thread that solves; `per_request_us`: that divided by the waiting requests.
- `digest`: of the plan of the last problem, by kernel.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from runtime.config import ClusterConfig, ControlConfig, OrderConfig
from runtime.control.agent_io import Send
from runtime.control.scheduler_io import AddRequest, AddRequests, PlanSolved, SolvePlan, Tick
from runtime.messages import PROTOCOL, AgentHello, LoadStages, StageReady
from runtime.policy.slo.plan.annealing import solve
from runtime.policy.slo.plan.compiled import PLAIN, PlanKernel, compile_kernel
from runtime.policy.slo.plan.problem import GroupPlan, Problem
from runtime.scheduler.order.plan_solver import PLAIN_ROUNDS
from runtime.scheduler.scheduler import Scheduler
from runtime.sim.models.family import App, Cutting, SimulatedFamily, family_of
from runtime.types import SamplingParams, SequenceRequest

_SECOND = 1_000_000_000
_DEVICE = "device"
#: Time between two ticks, and their number.
_TICK, _TICKS = _SECOND // 2, 24
#: Requests that are added at once while the queue is filled.
_LOT = 1000
#: SLOs in ms, and limits of answers in tokens.
_SLOS, _ANSWERS = (20_000, 60_000, 3_600_000), (32, 128, 400)


@dataclass
class WaitingRun:
    """The scheduler with what it took. `now`: its clock in ns."""

    family: SimulatedFamily
    scheduler: Scheduler
    now: int = 0
    plans: list[SolvePlan] = field(default_factory=list)

    def handle(self, event: Any) -> float:
        """Return the seconds that an event takes; loads are done at once, rows never."""
        begin = time.perf_counter()
        commands = self.scheduler.handle(event, self.now)
        took = time.perf_counter() - begin
        for command in commands:
            if isinstance(command, SolvePlan):
                self.plans.append(command)
            elif isinstance(command, Send) and isinstance(command.message, LoadStages):
                for stage in command.message.stages:
                    spec = replace(self.family.chain(stage.model).spec, name=stage.id)
                    self.handle(StageReady(_DEVICE, stage, spec, 0, took=_SECOND))
        return took

    def fill(self, asked: Sequence[SequenceRequest]) -> None:
        """Add requests in lots, without forecasts."""
        order = self.scheduler.order
        if order is None:
            raise RuntimeError("the scheduler has no order by deadline")
        forecasts = order.forecasts
        forecasts.promise = lambda sequence, now: None  # type: ignore[method-assign]
        for first in range(0, len(asked), _LOT):
            lot = tuple(asked[first : first + _LOT])
            self.now = lot[-1].arrival
            self.handle(AddRequests(lot))
        del forecasts.promise  # type: ignore[method-assign]


def opened(models: int, fit: int, places: int) -> WaitingRun:
    """Return a scheduler with one device."""
    family = family_of([App(f"app{number:02}", "llama-7b", "full") for number in range(models)], Cutting())
    chains = [family.chain(name) for name in family.chains]
    config = ClusterConfig(residency="swap", max_num_seqs=places, control=ControlConfig.off(), order=OrderConfig("qlm"))
    largest = max(sum(block.nbytes for block in family.blocks() if block.id in {use.block for use in chain.uses})
                  for chain in chains)  # fmt: skip
    run = WaitingRun(family, Scheduler(chains, family.blocks(), config))
    pages = 1 << 16
    run.handle(AgentHello(_DEVICE, PROTOCOL, "measured", pages, family.page_bytes, fit * largest, _DEVICE))
    return run


def drawn(count: int, models: Sequence[str], seed: int) -> list[SequenceRequest]:
    """Return requests for all models in turn; their classes are drawn."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(3, 1000) for _ in range(length)) for length in (16, 64, 256)]
    return [
        SequenceRequest(
            f"s{number}", f"s{number}", models[number % len(models)], rng.choice(prompts),
            SamplingParams(rng.choice(_ANSWERS), ignore_eos=True), arrival=number * 1000, slo_ms=rng.choice(_SLOS),
        )
        for number in range(count)
    ]  # fmt: skip


def measure(requests: int, timed: int, models: int, fit: int, places: int, kernel: PlanKernel | None) -> dict[str, Any]:
    """Fill the queue, and return the document."""
    run = opened(models, fit, places)
    asked = drawn(requests, sorted(run.family.chains), 0)
    run.fill(asked[: requests - timed])
    gc.collect()
    arrivals = []
    for one in asked[requests - timed :]:
        run.now = one.arrival
        arrivals.append(run.handle(AddRequest(one)))
    ticks, solved, solving, sizes = [], [], [], []
    for _ in range(_TICKS):
        run.now += _TICK
        ticks.append(run.handle(Tick()))
        if run.plans and len(solving) < len(run.plans):
            command = run.plans[-1]
            plan, took = _solve(command.problem, kernel)
            solving.append(took)
            sizes.append(len(command.problem.groups))
            solved.append(run.handle(PlanSolved(command.number, plan, "", int(took * 1e9))))
    state = run.scheduler.state()
    plain = replace(run.plans[-1].problem, rounds=PLAIN_ROUNDS) if run.plans else None
    return {
        "requests": requests,
        "waiting": state.waiting,
        "arrival_us": _spread(arrivals, 1e6),
        "tick_ms": _spread(ticks, 1e3),
        "solved_ms": _spread(solved, 1e3) if solved else None,
        "groups": sizes,
        "solve_seconds": [round(each, 3) for each in solving],
        "per_request_us": [round(1e6 * each / requests, 3) for each in solving],
        "digest": {} if plain is None else {
            name: _digest(solve(plain, kernel=each))
            for name, each in (("plain", PLAIN), ("compiled", kernel)) if each is not None
        },
    }  # fmt: skip


def _solve(problem: Problem, kernel: PlanKernel | None) -> tuple[GroupPlan, float]:
    begin = time.perf_counter()
    plan = solve(replace(problem, rounds=PLAIN_ROUNDS)) if kernel is None else solve(problem, kernel=kernel)
    return plan, time.perf_counter() - begin


def _digest(plan: GroupPlan) -> str:
    return hashlib.sha256(repr((plan.orders, plan.score)).encode()).hexdigest()[:16]


def _spread(seconds: Sequence[float], factor: float) -> dict[str, float]:
    return {
        "mean": round(factor * statistics.mean(seconds), 1),
        "median": round(factor * statistics.median(seconds), 1),
        "max": round(factor * max(seconds), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400_000)
    parser.add_argument("--timed", type=int, default=400)
    parser.add_argument("--models", type=int, default=24)
    parser.add_argument("--fit", type=int, default=2)
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    kernel = compile_kernel()
    found = measure(given.requests, given.timed, given.models, given.fit, given.places, kernel)
    deliver({"kernel": "plain" if kernel is None else "compiled", **found}, given.output)


if __name__ == "__main__":
    main()
