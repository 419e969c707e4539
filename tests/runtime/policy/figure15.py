"""The paper's Figure 15 as an oracle: every block is predicted, and the real chain runs beside, block by block on real
inputs (BL-25).

    no speculation             T6   b + b + b
    all right and unchecked    T2   s + s + s
    wrong in A, the first      T3   b + v + s + s         a gain of T6 - T3
    wrong in C, the last       T6   b + b + b             a gain of 0
    all right and checked      T5   b + b + v + s         each waits for the check of the one before: the best there is

with real blocks of b, surrogates of s and checks of v seconds. The figure itself is not at hand: this is the reading
under which all that the text says of it is so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure15:
    """Times of a pass in the paper's scenarios: T6, T2, the one asked for, T5."""

    none: float
    ideal: float
    after_errors: float
    checked: float

    @property
    def gain(self) -> float:
        """What is gained with the errors asked for, against no speculation: T6 - T3 for one in the first block, 0 in
        the last.
        """
        return self.none - self.after_errors


def figure_15(
    blocks: Sequence[float], surrogates: Sequence[float], checks: Sequence[float], wrong: Collection[int] = ()
) -> Figure15:
    """Every block of a chain predicted, the real chain beside it. Unchecked where nothing is wrong (`after_errors` is
    `ideal` then).
    """
    none = math.fsum(blocks)
    last_wrong = max(wrong, default=-1)
    after = math.fsum(surrogates)
    if last_wrong >= 0:
        after = math.fsum((*blocks[: last_wrong + 1], checks[last_wrong], *surrogates[last_wrong + 1 :]))
    checked = math.fsum((*blocks[:-1], *checks[-2:-1], *surrogates[-1:]))
    return Figure15(none, min(math.fsum(surrogates), none), min(after, none), min(checked, none))
