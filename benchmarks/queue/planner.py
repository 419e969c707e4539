"""Compare planners: with all orders of small problems, with exact solvers on large ones, and by their time.

    python -m benchmarks.queue.planner exact [--cases 100]      2 queues x 6 groups, all 35,280 orders of each
    python -m benchmarks.queue.planner large [--seeds 20] [--solver cp-sat]…    100 x 16: annealing, exact ones at 1 s
    python -m benchmarks.queue.planner time                     by size, the compiled kernel and plain Python
    ... [--output FILE]

Problems are drawn: models of 0.7 to 3 GiB, groups of 1 to 64 requests, deadlines that cannot all be met. Seeds of the
search are those of the problems. CP-SAT starts from the insertion's order, as annealing does; MILP has 1 s for each
term. Both have one scenario, the mean, since with 32 of them one second ends in presolve. Building their models is not
counted, and takes far longer than the search.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from runtime.policy.slo.plan.annealing import solve
from runtime.policy.slo.plan.compiled import PLAIN, PlanKernel, compile_kernel
from runtime.policy.slo.plan.cp_sat import solve_by_cp_sat
from runtime.policy.slo.plan.evaluation import Evaluator, evaluate
from runtime.policy.slo.plan.insertion import by_deadline, insert_all
from runtime.policy.slo.plan.milp import solve_by_milp
from runtime.policy.slo.plan.paper import solve_as_paper
from runtime.policy.slo.plan.problem import (
    GroupPlan,
    Orders,
    PlanGroup,
    PlanQueue,
    PlanScore,
    Problem,
    QueueRates,
    Spread,
)
from runtime.policy.slo.plan.repair import repaired

_MIB = 1 << 20
#: Rounds of the search in 0.5 s, and for small problems.
_ROUNDS, _SMALL_ROUNDS = 120_000, 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("exact", "large", "time"))
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--solver", action="append", choices=("cp-sat", "milp", "none"))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    kernel = compile_kernel()
    compiled = round(time.perf_counter() - begun, 1)
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "exact": lambda: _exact(arguments.cases, kernel or PLAIN),
        "large": lambda: _large(
            arguments.seeds,
            kernel or PLAIN,
            [name for name in arguments.solver or ["cp-sat", "milp"] if name != "none"],
        ),
        "time": lambda: _time(kernel),
    }
    deliver(
        {"kernel": "plain" if kernel is None else "compiled", "compile s": compiled} | run[arguments.what](),
        arguments.output,
    )


def drawn(groups: int, queues: int, seed: int, models: int, exclusive: bool = False, **more: Any) -> Problem:
    """Return a random problem; `exclusive`: no two models fit together."""
    of = random.Random(seed)
    share = max(groups / queues, 1.0)
    sizes = [of.randint(700, 3000) * _MIB if not exclusive else of.randint(700, 1000) * _MIB for _ in range(models)]
    room = (1100 if exclusive else 6000) * _MIB
    found = tuple(
        PlanGroup(
            number,
            of.randrange(models),
            of.randint(1, 64),
            round((2.5 + of.uniform(0, 3.2) * share) * 1e6),
            Spread(of.randint(500, 5000) * 1000, of.randint(0, 500) * 1000),
            Spread(of.randint(200, 2500) * 1000, of.randint(0, 400) * 1000),
        )
        for number in range(groups)
    )
    lines = tuple(
        PlanQueue(f"cell {at}", room, (at % models,), Spread(of.randint(0, 1000) * 1000)) for at in range(queues)
    )
    rates = tuple(
        QueueRates((1024 + 512 * (at % 2),) * models, 50_000, 1500, 1500 if exclusive else 300, keeps=not exclusive)
        for at in range(queues)
    )
    return Problem(0, found, lines, tuple((model,) for model in range(models)), tuple(sizes), rates, seed=seed, **more)


def _all_orders(groups: int) -> Iterator[Orders]:
    for some in permutations(range(groups)):
        for cut in range(groups + 1):
            yield some[:cut], some[cut:]


def _exact(cases: int, kernel: PlanKernel) -> dict[str, Any]:
    """2 queues x 6 groups: is each solver's score the least of all orders?"""
    hits = {"annealing": 0, "insertion": 0, "cp-sat": 0}
    worst = 0.0
    with_late = 0
    for seed in range(cases):
        made = drawn(6, 2, seed, 3, exclusive=True, scenarios=8)
        judge = Evaluator(made, kernel)
        least = _least(judge)
        with_late += least.late > 0
        annealed = solve(replace(made, rounds=_SMALL_ROUNDS), kernel=kernel).score
        exact = solve_by_cp_sat(made, 60.0)
        hits["annealing"] += annealed == least
        hits["insertion"] += solve(made, kernel=kernel).score == least
        hits["cp-sat"] += exact is not None and exact.score == least
        worst = max(worst, _excess(annealed, least))
    return {
        "problems": cases,
        "whose best order has late groups": with_late,
        "best order found": hits,
        "annealing, largest excess": round(worst, 4),
    }


def _least(judge: Evaluator) -> PlanScore:
    """Return the least score: the best way to fill two queues, each way evaluated once per queue."""
    return min(judge.score(orders) for orders in _all_orders(len(judge.problem.groups)))


def _excess(score: PlanScore, least: PlanScore) -> float:
    """Return how much the first term that differs is above the least, relative to it."""
    terms = [*(term for pair in score.classes for term in pair), score.completion]
    best = [*(term for pair in least.classes for term in pair), least.completion]
    for term, other in zip(terms, best, strict=True):
        if term != other:
            return (term - other) / max(other, 1)
    return 0.0


def _large(seeds: int, kernel: PlanKernel, solvers: list[str]) -> dict[str, Any]:
    """100 groups x 16 queues."""
    rows = []
    solve_exactly: dict[str, Callable[[Problem], GroupPlan | None]] = {
        "cp-sat": lambda made: solve_by_cp_sat(replace(made, scenarios=1), 1.0, workers=2),
        "milp": lambda made: solve_by_milp(replace(made, scenarios=1), 1.0),
    }
    for seed in range(seeds):
        made = drawn(100, 16, seed, 12)
        begun = time.perf_counter()
        annealed = solve(replace(made, rounds=_ROUNDS), kernel=kernel)
        took = time.perf_counter() - begun
        scores: dict[str, PlanScore | None] = {
            "edf": evaluate(made, by_deadline(made)),
            "insertion": evaluate(made, insert_all(made)),
            "annealing": annealed.score,
        }
        scores |= {name: _score_on(made, solve_exactly[name](made)) for name in solvers}
        rows.append((took, scores))
        print(
            seed,
            round(took, 3),
            {name: None if each is None else (each.late, each.lateness // 1000) for name, each in scores.items()},
            flush=True,
        )
    found = {
        name: [score for _, scores in rows if (score := scores[name]) is not None]
        for name in ("edf", "insertion", "annealing", *solvers)
    }
    return {
        "problems": seeds,
        "rounds": _ROUNDS,
        "annealing s": [round(each(took for took, _ in rows), 3) for each in (statistics.median, max)],
        "late requests, mean": {
            name: round(statistics.mean(each.late for each in some), 1) for name, some in found.items() if some
        },
        "lateness of all requests in s, mean": {
            name: round(statistics.mean(each.lateness / 1e6 for each in some)) for name, some in found.items() if some
        },
        "plans found": {name: len(some) for name, some in found.items()},
        "annealing is best": sum(
            all(other is None or annealed < other for name, other in scores.items() if name != "annealing")
            for _, scores in rows
            if (annealed := scores["annealing"]) is not None
        ),
    }


def _score_on(made: Problem, plan: GroupPlan | None) -> PlanScore | None:
    return None if plan is None else evaluate(made, plan.orders)


def _time(kernel: PlanKernel | None) -> dict[str, Any]:
    """Seconds by size."""
    rows = []
    for groups, queues in ((10, 1), (30, 1), (30, 4), (100, 1), (100, 16)):
        made = drawn(groups, queues, 0, 12)
        row: dict[str, Any] = {"groups": groups, "queues": queues}
        row["insertion ms"] = _median(lambda made=made: insert_all(made), 1000)
        row["evaluator ms"] = _median(lambda made=made: Evaluator(made), 1000)
        plan = solve(made)
        row["repair ms"] = _median(lambda made=made, plan=plan: repaired(plan, made), 1000)
        if groups <= 10:
            row["paper's formulation ms"] = _median(lambda made=made: solve_as_paper(made, 10.0), 1000, 1)
        row["1000 rounds, plain, ms"] = _median(lambda made=made: solve(replace(made, rounds=1000)), 1000, 1)
        if kernel is not None:
            row["1000 rounds, compiled, ms"] = _median(
                lambda made=made: solve(replace(made, rounds=20_000), kernel=kernel), 50
            )
        rows.append(row)
    return {"times": rows, "one plan": _one_plan(kernel)}


def _one_plan(kernel: PlanKernel | None, cases: int = 20) -> dict[str, Any]:
    """Do the kernels find the same plans? Digests over 20 problems, each of 20 groups and 3 queues."""
    by_name = {"plain": PLAIN} | ({} if kernel is None else {"compiled": kernel})
    digests = {name: hashlib.sha256() for name in by_name}
    for seed in range(cases):
        made = drawn(20, 3, seed, 6, rounds=300)
        for name, each in by_name.items():
            plan = solve(made, kernel=each)
            digests[name].update(repr((plan.orders, plan.score, plan.solver)).encode())
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}


def _median(act: Callable[[], object], factor: float, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        act()
        times.append(factor * (time.perf_counter() - begun))
    return round(statistics.median(times), 2)


if __name__ == "__main__":
    main()
