"""Make planning problems, and enumerate all orders of small ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations

from runtime.policy.slo.plan.problem import Orders, PlanGroup, PlanQueue, Problem, QueueRates, Spread

MIB = 1 << 20
SECOND = 1_000_000


def group(number: int, chain: int = 0, due: int = 60 * SECOND, drain: int = SECOND, **more: object) -> PlanGroup:
    """Return a group of ten members with exact times."""
    fields = {"members": 10, "drain": Spread(drain), "execution": Spread(0)} | more
    return PlanGroup(number, chain, due=due, **fields)  # type: ignore[arg-type]


def problem(groups: list[PlanGroup], cells: int = 1, models: int = 2, **more: object) -> Problem:
    """Return a problem of models of 1 GiB that take 2 s to load and do not fit together; model 0 is loaded."""
    fields: dict[str, object] = {
        "queues": tuple(PlanQueue(f"cell {at}", 1024 * MIB, (0,)) for at in range(cells)),
        "chains": tuple((model,) for model in range(models)),
        "sizes": (1024 * MIB,) * models,
        "rates": (QueueRates((1024,) * models, cold_us=2 * SECOND // 1024, warm_us=2 * SECOND // 1024),) * cells,
    } | more
    return Problem(0, tuple(groups), **fields)  # type: ignore[arg-type]


def drawn(groups: int, queues: int, seed: int, models: int = 3, together: bool = False, **more: object) -> Problem:
    """Return a random problem in which not all deadlines can be met; `together`: two or three models fit at once."""
    of = random.Random(seed)
    share = groups / queues
    sizes = [of.randint(700, 1000) * MIB for _ in range(models)]
    found = tuple(
        PlanGroup(
            number,
            of.randrange(models),
            of.randint(1, 40),
            round((2 + of.uniform(0, 3.2) * share) * SECOND),
            Spread(of.randint(500, 4000) * 1000, of.randint(0, 400) * 1000),
            Spread(of.randint(200, 2000) * 1000, of.randint(0, 300) * 1000),
        )
        for number in range(groups)
    )
    room = (2500 if together else 1100) * MIB
    fields: dict[str, object] = {
        "queues": tuple(PlanQueue(f"cell {at}", room, (at % models,), Spread(at * 100_000)) for at in range(queues)),
        "chains": tuple((model,) for model in range(models)),
        "sizes": tuple(sizes),
        "rates": tuple(QueueRates((1024 + 512 * (at % 2),) * models, 50_000, 2000, 2000) for at in range(queues)),
        "scenarios": 8,
        "seed": seed,
    } | more
    return Problem(0, found, **fields)  # type: ignore[arg-type]


def all_orders(groups: int, queues: int) -> Iterator[Orders]:
    """Yield every way to put numbered groups into one or two queues."""
    for some in permutations(range(groups)):
        for cut in range(groups + 1) if queues == 2 else (groups,):
            yield (some[:cut], some[cut:])[:queues]
