"""Exceptions of the integer engine: for a plan that contradicts earlier ones, and for faults that tests request."""

from __future__ import annotations


class PlanViolation(Exception):
    """A plan contradicts earlier ones or itself: a defect of the code that made it."""


class FakeFault(Exception):
    """The fault that a test requested."""


def require(condition: bool, otherwise: str) -> None:
    """Raise PlanViolation with this message unless the condition holds."""
    if not condition:
        raise PlanViolation(otherwise)
