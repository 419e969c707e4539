"""Pair the parts of two models for scoring: components, layers, or proportional groups of layers (BL-04, BL-05).

A run's score is that of the hidden states after its last component. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Literal

from zoo.errors import Incomparable, InputError
from zoo.manifest import Placed

Granularity = Literal["component", "layer", "group"]


@dataclass(frozen=True, slots=True)
class Span:
    """Components (or layers) [lo, hi)."""

    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class ScoredUnit:
    """A part of a chain. `layers` is an empty range for the embedding or the head alone."""

    components: Span
    layers: Span

    def through(self, last: ScoredUnit) -> ScoredUnit:
        """Return the unit from this one to a later one."""
        return ScoredUnit(Span(self.components.lo, last.components.hi), Span(self.layers.lo, last.layers.hi))


@dataclass(frozen=True)
class Pairing:
    """Units of two models.

    Fields:
        a: All units of a, in order: an axis of the matrix; `b` likewise.
        pairs: The units to score against each other.
    """

    granularity: Granularity
    a: tuple[ScoredUnit, ...]
    b: tuple[ScoredUnit, ...]
    pairs: tuple[tuple[ScoredUnit, ScoredUnit], ...]


def components_of(chain: Sequence[Placed]) -> tuple[ScoredUnit, ...]:
    """Return every component as a unit."""
    units = []
    reached = 0
    for at, placed in enumerate(chain):
        layers = Span(reached, reached) if placed.layer is None else Span(placed.layer, placed.layer + 1)
        units.append(ScoredUnit(Span(at, at + 1), layers))
        reached = layers.hi
    return tuple(units)


def layers_of(chain: Sequence[Placed]) -> tuple[ScoredUnit, ...]:
    """Return the layers, each with its components; embedding, stitches and head belong to none."""
    units: list[ScoredUnit] = []
    for unit, placed in zip(components_of(chain), chain, strict=True):
        if placed.layer is None:
            continue
        if units and units[-1].layers == unit.layers and units[-1].components.hi == unit.components.lo:
            units[-1] = units[-1].through(unit)
        else:
            units.append(unit)
    return tuple(units)


def pairing(
    a: Sequence[Placed], b: Sequence[Placed], granularity: Granularity | None = None, groups: int | None = None
) -> Pairing:
    """Return the units to score between two chains.

    Args:
        granularity: None for layers if the models have equally many, else groups.
        groups: Number of groups; None for as many as divide both depths evenly: 3 layers of 6 go with 4 of 8.

    Raises:
        InputError: The models have different components or numbers of layers, or the number of groups is impossible.
        Incomparable: A model without layers.
    """
    layers_a, layers_b = layers_of(a), layers_of(b)
    if not layers_a or not layers_b:
        raise Incomparable("a chain without layers has nothing to compare")
    chosen = granularity or ("layer" if len(layers_a) == len(layers_b) and groups is None else "group")
    if groups is not None and chosen != "group":
        raise InputError("a number of groups goes with the granularity `group`")
    if chosen == "component":
        return _by_component(a, b)
    if chosen == "group":
        return Pairing(chosen, layers_a, layers_b, _grouped(layers_a, layers_b, groups))
    if len(layers_a) != len(layers_b):
        raise InputError(
            f"{len(layers_a)} and {len(layers_b)} layers cannot be compared one by one: use the granularity `group`"
        )
    return Pairing(chosen, layers_a, layers_b, tuple(zip(layers_a, layers_b, strict=True)))


def _by_component(a: Sequence[Placed], b: Sequence[Placed]) -> Pairing:
    if [placed.component.kind for placed in a] != [placed.component.kind for placed in b]:
        raise InputError(
            "the models are not made of the same components one by one: use the granularity `layer` or `group`"
        )
    units_a, units_b = components_of(a), components_of(b)
    return Pairing("component", units_a, units_b, tuple(zip(units_a, units_b, strict=True)))


def _grouped(
    a: Sequence[ScoredUnit], b: Sequence[ScoredUnit], groups: int | None
) -> tuple[tuple[ScoredUnit, ScoredUnit], ...]:
    count = groups if groups is not None else _even(len(a), len(b))
    if not 0 < count <= min(len(a), len(b)):
        raise InputError(f"{len(a)} and {len(b)} layers make no {count} groups")
    return tuple(zip(_cut(a, count), _cut(b, count), strict=True))


def _even(a: int, b: int) -> int:
    """Return a number of groups that divides both depths, or the shallower model's depth if only 1 does."""
    common = gcd(a, b)
    return common if common > 1 else min(a, b)


def _cut(units: Sequence[ScoredUnit], count: int) -> list[ScoredUnit]:
    bounds = [(at * len(units) + count // 2) // count for at in range(count + 1)]
    return [units[lo].through(units[hi - 1]) for lo, hi in pairwise(bounds)]


def equivalent_runs(a: Sequence[str], b: Sequence[str], scores: Sequence[float], threshold: float) -> list[Span]:
    """Return the maximal runs of components that are similar enough to form one block each (BL-04), in order.

    A component that is identical in both is shared already and belongs to no run. So at T = 1 only identical weights
    are shared.

    Args:
        a, b: Component digests of two chains of equal length.
        scores: The similarity after each component.
        threshold: A score must exceed it.
    """
    alike = [x != y and score > threshold for x, y, score in zip(a, b, scores, strict=True)]
    starts = [at for at, each in enumerate(alike) if each and not (at and alike[at - 1])]
    ends = [at + 1 for at, each in enumerate(alike) if each and not (at + 1 < len(alike) and alike[at + 1])]
    return [Span(lo, hi) for lo, hi in zip(starts, ends, strict=True)]
