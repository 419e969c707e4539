"""The paper's Figure 15 as an oracle: every block is speculated, and the real chain runs beside it (BL-25).

    no speculation             T6   b + b + b
    all right and unchecked    T2   s + s + s
    wrong in A, the first      T3   b + v + s + s         a gain of T6 - T3
    wrong in C, the last       T6   b + b + b             a gain of 0
    all right and checked      T5   b + b + v + s         each waits for the check of the one before: the best case

b, s and v are the seconds of a real block, a surrogate and a check. The figure itself is not at hand: this reading
agrees with all that the paper's text says about it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure15:
    """Times of a pass in seconds in the paper's scenarios.

    Fields:
        none: Without speculation (T6).
        ideal: All predictions right and unchecked (T2).
        after_errors: With the given errors.
        checked: All predictions right and checked (T5).
    """

    none: float
    ideal: float
    after_errors: float
    checked: float

    @property
    def gain(self) -> float:
        """Return the seconds saved with the given errors: T6 - T3 for one in the first block, 0 in the last."""
        return self.none - self.after_errors


def figure_15(
    blocks: Sequence[float], surrogates: Sequence[float], checks: Sequence[float], wrong: Collection[int] = ()
) -> Figure15:
    """Return the times of a chain in which every block is speculated, with wrong predictions at `wrong`.

    Without errors nothing is checked, and `after_errors` equals `ideal`.
    """
    none = math.fsum(blocks)
    last_wrong = max(wrong, default=-1)
    after = math.fsum(surrogates)
    if last_wrong >= 0:
        after = math.fsum((*blocks[: last_wrong + 1], checks[last_wrong], *surrogates[last_wrong + 1 :]))
    checked = math.fsum((*blocks[:-1], *checks[-2:-1], *surrogates[-1:]))
    return Figure15(none, min(math.fsum(surrogates), none), min(after, none), min(checked, none))
