"""Choose the cell on which a sequence decodes, by interference (TI-14).

    cells -> alpha: those with pages that last for it; beta: the rest
    two drawn from alpha -> the one on which heavy decodes will have the smaller share, the freer one of equals

A cell is a path for decoding. `po2` is the paper's rule, the best of two (power of two choices): with loads that are
some time old, it does not send all to one cell, as the best of all (`least`) would. `random` draws one; `worst` takes
the cell with the largest share of heavy decodes: the paper's baselines. Pure: the draws are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.decode_config import DecodeRule


class DecodeCell(NamedTuple):
    """A candidate.

    Fields:
        heavy, light: Sequences that decode there, with those on their way.
        free: Share of its pages that is free.
        lasts: Whether its pages last for the sequence.
    """

    heavy: int
    light: int
    free: float
    lasts: bool

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


def choose_cell(cells: Sequence[DecodeCell], heavy: bool, rule: DecodeRule, number: int) -> DecodeChoice:
    """Choose a cell for a sequence.

    Args:
        heavy: Whether it is a heavy decode.
        number: A random number, at least the square of the number of cells.
    """
    alpha = tuple(at for at, cell in enumerate(cells) if cell.lasts)
    beta = tuple(at for at, cell in enumerate(cells) if not cell.lasts)
    ratios = tuple(cell.ratio(heavy) for cell in cells)
    drawn = _drawn(alpha, rule, number)
    chosen: int | None = None
    if drawn:
        sign = -1 if rule == "worst" else 1
        chosen = min(drawn, key=lambda at: (sign * ratios[at], -sign * cells[at].free))
    return DecodeChoice(chosen, alpha, beta, drawn, ratios)


def _drawn(alpha: tuple[int, ...], rule: DecodeRule, number: int) -> tuple[int, ...]:
    if rule == "random" and alpha:
        return (alpha[number % len(alpha)],)
    if rule == "po2" and len(alpha) > 2:
        return tuple(alpha[at] for at in two_of(len(alpha), number))
    return alpha
