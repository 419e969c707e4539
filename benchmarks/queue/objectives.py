"""Judge plans by both objectives: the score of `evaluation`, and the paper's sum of penalties (QL-18, equation 13).

    python -m benchmarks.queue.objectives [--cases 30] [--groups 6] [--loose 2.5] [--output FILE]

Each drawn problem (`planner.drawn`, 2 queues) is solved by the paper's program, by annealing, by insertion and by
deadline alone. `--loose`: factor of all deadlines, since the paper's program has no plan where one cannot be met.

Printed by solver, over the problems for which the paper's program has a plan: late requests; the sum of the mean
penalties in s, completion less SLO, which is all that equation 13 sees; and the share of groups that meet equation 12,
being on time with the probability `alpha` if times are normal.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from benchmarks.queue.planner import drawn
from benchmarks.reports import deliver
from runtime.policy.slo.plan.annealing import solve
from runtime.policy.slo.plan.evaluation import evaluate
from runtime.policy.slo.plan.insertion import by_deadline, insert_all
from runtime.policy.slo.plan.paper import penalties, solve_as_paper
from runtime.policy.slo.plan.problem import GroupPlan, Orders, Problem

_ROUNDS = 4_000
_SOLVERS: dict[str, Callable[[Problem], Orders]] = {
    "annealing": lambda made: solve(replace(made, rounds=_ROUNDS)).orders,
    "insertion": insert_all,
    "edf": by_deadline,
}


def judged(made: Problem, orders: Orders) -> dict[str, float]:
    """Return the figures of one order, numbers of groups by queue."""
    found, z = penalties(made, orders), NormalDist().inv_cdf(made.alpha)
    return {
        "late": evaluate(made, orders).late,
        "penalties s": sum(mean for mean, _ in found) / 1e3,
        "on time": sum(mean + z * sigma <= 1e-3 for mean, sigma in found) / len(found),
    }


def compare(cases: int, groups: int, loose: float) -> dict[str, Any]:
    """Return the mean figures by solver."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ("paper", *_SOLVERS)}
    for seed in range(cases):
        made = drawn(groups, 2, seed, 3, exclusive=True)
        made = replace(made, groups=tuple(replace(each, due=round(loose * each.due)) for each in made.groups))
        plan = solve_as_paper(made, 10.0)
        if not isinstance(plan, GroupPlan):
            continue
        rows["paper"].append(judged(made, plan.orders))
        for name, orders in _SOLVERS.items():
            rows[name].append(judged(made, orders(made)))
    return {
        "problems": cases,
        "with a plan of the paper's program": len(rows["paper"]),
        "means": {
            name: {key: round(statistics.mean(each[key] for each in some), 2) for key in some[0]}
            for name, some in rows.items()
            if some
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--loose", type=float, default=2.5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    deliver(compare(given.cases, given.groups, given.loose), given.output)


if __name__ == "__main__":
    main()
