"""The kernel as plain Python, or compiled by numba (extra `plan`): the same functions over other columns.

PLAIN.search(...)        at once
compile_kernel()         some seconds, on any thread; None without numba
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from runtime.policy.slo.plan import kernel
from runtime.policy.slo.plan.scenarios import Integers


@dataclass(frozen=True, slots=True)
class PlanKernel:
    """One form of the kernel.

    Fields:
        compiled: Whether it takes arrays of int64 instead of lists.
    """

    queue_cost: Callable[..., None]
    search: Callable[..., None]
    load_times: Callable[..., None]
    compiled: bool

    def column(self, values: Sequence[int] | Integers) -> Any:
        if self.compiled:
            return np.asarray(values, dtype=np.int64)
        return values.tolist() if isinstance(values, np.ndarray) else list(values)


PLAIN = PlanKernel(kernel.queue_cost, kernel.search, kernel.load_times, compiled=False)


def compile_kernel() -> PlanKernel | None:
    """Compile the kernel; takes some seconds. None without numba. Raises ImportError if numba is there and broken."""
    if importlib.util.find_spec("numba") is None:
        return None
    import numba

    copy = _copy_of(kernel)
    for each in kernel.FUNCTIONS:  # compiled functions call each other by the names of their module
        setattr(copy, each.__name__, numba.njit(nogil=True, error_model="numpy")(getattr(copy, each.__name__)))
    made = PlanKernel(copy.queue_cost, copy.search, copy.load_times, compiled=True)
    _run_once(made)
    return made


def _copy_of(module: ModuleType) -> ModuleType:
    """Return a second instance of a module, so that the first one stays plain Python."""
    spec = module.__spec__
    if spec is None or spec.loader is None:
        raise ImportError(f"{module.__name__} has no source")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _run_once(made: PlanKernel) -> None:
    """Compile for the types that are used, by searching the order of two groups."""
    from runtime.policy.slo.plan.problem import PlanGroup, PlanQueue, Problem, QueueRates, Spread
    from runtime.policy.slo.plan.scenarios import draws
    from runtime.policy.slo.plan.tables import tables_of

    groups = tuple(PlanGroup(number, 0, 1, 1, Spread(1), Spread(1)) for number in (0, 1))
    tables = tables_of(Problem(0, groups, (PlanQueue("q", 1),), ((0,),), (1,), (QueueRates((1024,)),)))
    work, lengths, order = made.column([0] * tables.layout.work), made.column([2]), made.column([0, 1])
    made.search(tables.layout, made.column(tables.data), order, lengths, made.column(draws(8, 0)), 2, 1, work)
