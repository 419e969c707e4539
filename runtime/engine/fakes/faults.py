"""What engines that count raise: for a plan that contradicts what went before, and the faults that tests ask for."""

from __future__ import annotations


class PlanViolation(Exception):
    """A plan contradicts what went before, or itself: a defect of its maker."""


class FakeFault(Exception):
    """The fault that was asked for."""


def require(condition: bool, otherwise: str) -> None:
    """Raises PlanViolation, and says what is wrong."""
    if not condition:
        raise PlanViolation(otherwise)
