"""Say whether pages of a device last for what its sequences will still produce and one more (TI-20, TI-21, TI-22).

    greedy     its pages are free now
    static     and so are those that it will grow to
    dynamic    and so they are until the first sequence of the device ends
    peak       and so they are until all have ended (Past-Future, arXiv 2507.10150)

Pages grow with the tokens, all sequences by one token at a time, and are free when their sequence ends. So the most are
taken just before an end, and `peak` looks at each of them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.decode_config import ReserveRule


class Growth(NamedTuple):
    """What one sequence takes on a device.

    Fields:
        have: Pages that its context fills now.
        left: Tokens that it will still produce, at least 1.
        step: Pages that a token adds.
    """

    have: float
    left: int
    step: float

    def after(self, tokens: int) -> float:
        """Return its pages after so many more tokens."""
        return self.have + self.step * tokens


def peak(sequences: Sequence[Growth]) -> float:
    """Return the most pages that sequences take together until all have ended. O(n log n)."""
    have = step = most = 0.0
    for each in sorted(sequences, key=lambda one: -one.left):  # those that are left when `each` ends
        have, step = have + each.have, step + each.step
        most = max(most, have + step * each.left)
    return most


def lasts(rule: ReserveRule, capacity: float, running: Sequence[Growth], new: Growth) -> bool:
    """Return whether a sequence may join those that run on a device.

    Args:
        capacity: Pages for the running sequences and the new one together.
    """
    if rule == "greedy":
        return True
    if rule == "static":
        return new.after(new.left) <= capacity - sum(each.have for each in running)
    if rule == "dynamic":
        first = min((each.left for each in running), default=new.left)
        grown = sum(each.after(first) for each in running)
        return grown + new.after(min(new.left, first)) <= capacity
    return peak([*running, new]) <= capacity
