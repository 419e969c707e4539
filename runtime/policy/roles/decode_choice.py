"""Choose the cell on which a sequence decodes, by interference (TI-14).

    cells -> alpha: those with pages that last for it; beta: the rest
    two drawn from alpha -> the one on which heavy decodes will have the smaller share, the freer one of equals

A cell is a path for decoding. `po2` is the paper's rule, the best of two (power of two choices): with loads that are
some time old, it does not send all to one cell, as the best of all (`least`) would. `random` draws one; `worst` takes
the cell with the largest share of heavy decodes: the paper's baselines.

`po2` and `least` then prefer a cell that has more of the sequence's K and V, which need not be sent, if it is nearly as
good as the one that was taken: by the margin, times how much more of them it has. The cell with the most is a candidate
of `po2` beside those that are drawn. Pure: the draws are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.decode_config import DecodeRule


class DecodeCell(NamedTuple):
    """A candidate.

    Fields:
        heavy, light: Sequences that decode there, with those on their way.
        free: Share of its pages that is free, or not needed as other sequences there have them.
        lasts: Whether its pages last for the sequence.
        present: Share of the sequence's context of which K and V are there.
    """

    heavy: int
    light: int
    free: float
    lasts: bool
    present: float = 0.0

    def ratio(self, heavy: bool) -> float:
        """Return the share of heavy decodes with one more of this kind."""
        return (self.heavy + heavy) / (self.heavy + self.light + 1)


class DecodeChoice(NamedTuple):
    """A choice and what it was made from, as indices of cells.

    Fields:
        chosen: None where alpha is empty: the sequence waits.
        ratios: Share of heavy decodes in each cell with the sequence.
    """

    chosen: int | None
    alpha: tuple[int, ...]
    beta: tuple[int, ...]
    drawn: tuple[int, ...]
    ratios: tuple[float, ...]


def two_of(count: int, number: int) -> tuple[int, int]:
    """Return two different indices below `count`, each pair equally likely for equally likely numbers."""
    number, first = divmod(number, count)
    second = number % (count - 1)
    return first, second + (second >= first)


def choose_cell(
    cells: Sequence[DecodeCell], heavy: bool, rule: DecodeRule, number: int, margin: float = 0.0
) -> DecodeChoice:
    """Choose a cell for a sequence.

    Args:
        heavy: Whether it is a heavy decode.
        number: A random number, at least the square of the number of cells.
        margin: By how much a cell with all K and V of the sequence may have a larger share of heavy decodes, and a
            smaller share of free pages, than one without any; 0: what is there does not count.
    """
    alpha = tuple(at for at, cell in enumerate(cells) if cell.lasts)
    beta = tuple(at for at, cell in enumerate(cells) if not cell.lasts)
    ratios = tuple(cell.ratio(heavy) for cell in cells)
    drawn = _drawn(alpha, rule, number)
    chosen: int | None = None
    if drawn:
        sign = -1 if rule == "worst" else 1
        chosen = min(drawn, key=lambda at: (sign * ratios[at], -sign * cells[at].free))
        if margin and rule in ("po2", "least"):
            chosen = _preferred(cells, ratios, alpha, drawn, chosen, margin)
    return DecodeChoice(chosen, alpha, beta, drawn, ratios)


def _preferred(
    cells: Sequence[DecodeCell], ratios: Sequence[float], alpha: Sequence[int], drawn: Sequence[int], best: int,
    margin: float,
) -> int:  # fmt: skip
    """Return the cell with the most of the sequence's K and V among those that are nearly as good as `best`."""

    def worth(at: int) -> tuple[float, float, float]:
        return cells[at].present, -ratios[at], cells[at].free

    def near(at: int) -> bool:
        allowed = margin * (cells[at].present - cells[best].present)
        return ratios[at] <= ratios[best] + allowed and cells[at].free >= cells[best].free - allowed

    more = [at for at in {*drawn, max(alpha, key=worth)} if cells[at].present > cells[best].present and near(at)]
    return max(more, key=worth, default=best)


def _drawn(alpha: tuple[int, ...], rule: DecodeRule, number: int) -> tuple[int, ...]:
    if rule == "random" and alpha:
        return (alpha[number % len(alpha)],)
    if rule == "po2" and len(alpha) > 2:
        return tuple(alpha[at] for at in two_of(len(alpha), number))
    return alpha
