"""Follow which tokens of which tables lie on other devices, and split a step's attention accordingly (IL-04, IL-27).

A simulated engine keeps no pages. What it knows of loans are the plans' `place_changes` and `released`, as live ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from runtime.loans import with_change
from runtime.sim.cost.blocks import BlockWork
from runtime.sim.cost.loans import LentWork
from runtime.sim.models.shapes import ModelShape
from runtime.types import Row, SentAway, StepPlan


class Lenders(Protocol):
    """Reach the devices that hold K and V for an engine."""

    def wait(self, debtor: str, shape: ModelShape, asked: Mapping[str, LentWork], here: float, busy: int) -> int:
        """Return the ns that a stage of a step waits for its creditors.

        Args:
            asked: The work of each creditor.
            here: ns of the stage's attention to the tokens on the debtor.
            busy: ns of the step without this waiting.
        """
        ...


class PagesAway:
    """The loans of one debtor, by table."""

    def __init__(self) -> None:
        self._gone: dict[str, tuple[SentAway, ...]] = {}

    def __len__(self) -> int:
        return len(self._gone)

    def follow(self, plan: StepPlan) -> None:
        """Apply what a plan says before its rows run."""
        for name in plan.released:
            self._gone.pop(name, None)
        for each in plan.place_changes:
            if each.seq in plan.released:  # closed since, and maybe opened again
                continue
            left = with_change(self._gone.get(each.seq, ()), each)
            self._gone[each.seq] = left
            if not left:
                del self._gone[each.seq]

    def any_of(self, rows: Iterable[Row]) -> bool:
        """Return whether tokens of some of these rows are away."""
        return any(row.seq in self._gone for row in rows)

    def here(self, rows: Iterable[Row], meanwhile: bool = False) -> dict[str, BlockWork]:
        """Return the work of rows by stage, with attention to the tokens that are here.

        `meanwhile`: of the rows that run while creditors attend. Chunks of rows with all their tokens here come later.
        """
        works: dict[str, BlockWork] = {}
        for row in rows:
            gone = self._gone.get(row.seq)
            if meanwhile and not gone and len(row.tokens) > 1:
                continue
            works.setdefault(row.model, BlockWork()).add_row(
                row.start - sum(each.last - each.first for each in gone or ()), len(row.tokens)
            )
        return works

    def work_asked(self, rows: Iterable[Row], layers: Mapping[str, int]) -> dict[str, dict[str, LentWork]]:
        """Return what creditors do for these rows, by stage and creditor. `layers`: attention layers of each stage."""
        found: dict[str, dict[str, LentWork]] = {}
        for row in rows:
            for creditor, lent in _by_creditor(self._gone.get(row.seq, ())).items():
                stage = found.setdefault(row.model, {})
                if creditor not in stage:
                    stage[creditor] = LentWork(layers[row.model])
                stage[creditor].add_row(len(row.tokens), lent)
        return found


def _by_creditor(gone: Sequence[SentAway]) -> Mapping[str, int]:
    """Return the tokens that each creditor holds."""
    lent: dict[str, int] = {}
    for each in gone:
        lent[each.creditor] = lent.get(each.creditor, 0) + each.last - each.first
    return lent
