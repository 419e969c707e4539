"""Which layers come from which model, at every point of Figures 10 and 11 of BlockLLM. Plans as data; pure.

A mixture is one letter per layer: `a` the first model, `b` the second, `s` the second's pruned stand-in. Embedding and
head are b's: the figures call a decoding layer a block, and exchange nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zoo.errors import InputError

#: `b` is the model that is served, `a` the one whose blocks it shares.
FIRST, SECOND, PRUNED = "a", "b", "s"
Experiment = Literal["sharing", "switching"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """`layers`: one letter per layer; `ends`: whose embedding and head."""

    layers: str
    ends: str = SECOND

    @property
    def code(self) -> str:
        """Names the mixture in files."""
        return f"{self.ends}:{self.layers}"


@dataclass(frozen=True, slots=True)
class MixturePoint:
    """One point of a line. `line`: shared or pruned, with `size`: layers that are shared (sharing), or the layer behind
    which models are switched (switching). `at`: the first shared layer, or the layers between switches."""

    line: str
    size: int
    at: int
    mixture: Mixture


def whole(layers: int, letter: str) -> Mixture:
    """One model alone."""
    return Mixture(letter * layers, letter)


def sharing_points(layers: int, counts: Sequence[int], replaceable: str = "") -> list[MixturePoint]:
    """For each count k and each start: k layers in a row from the first model, all others from the second (BL-07).

    Args:
        replaceable: one letter per layer, `s` where a pruned stand-in exists: a second line for each k, of these in
            place of the first's.

    Raises:
        InputError: a count that the models do not have.
    """
    for count in counts:
        if not 1 <= count <= layers:
            raise InputError(f"{count} layers in a row cannot be shared: the models have {layers}")
    points = [_shared("shared", FIRST, layers, k, at) for k in sorted(set(counts)) for at in range(layers - k + 1)]
    if replaceable:
        pruned = [_shared("pruned", PRUNED, layers, k, at) for k in sorted(set(counts)) for at in range(layers - k + 1)]
        points += [point for point in pruned if set(replaceable[point.at : point.at + point.size]) == {PRUNED}]
    return points


def _shared(line: str, letter: str, layers: int, count: int, at: int) -> MixturePoint:
    return MixturePoint(line, count, at, Mixture(SECOND * at + letter * count + SECOND * (layers - at - count)))


def switching_points(
    layers: int, starts: Sequence[int], intervals: Sequence[int], replaceable: str = ""
) -> list[MixturePoint]:
    """The second model up to and behind layer `start`, then another every x layers: x of the second, x of the first,
    and so on (BL-08).

    An interval that reaches the end is the second model alone.

    Raises:
        InputError: a start that leaves no layer, or an interval below one.
    """
    for start in starts:
        if not 0 <= start < layers:
            raise InputError(f"behind layer {start} nothing can be switched: the models have {layers} layers")
    if any(x < 1 for x in intervals):
        raise InputError("models are switched every one or more layers")
    lines = [("switched", FIRST)] + ([("pruned", PRUNED)] if replaceable else [])
    found = []
    for line, letter in lines:
        for start in sorted(set(starts)):
            for x in sorted(set(intervals)):
                mixture = _switched(letter, layers, start, x, replaceable if letter == PRUNED else letter * layers)
                found.append(MixturePoint(line, start, x, mixture))
    return found


def _switched(letter: str, layers: int, start: int, x: int, available: str) -> Mixture:
    """Layers without a stand-in stay the second model's."""
    turn = [
        letter if layer >= start and (layer - start) // x % 2 and available[layer] == letter else SECOND
        for layer in range(layers)
    ]
    return Mixture("".join(turn))


def usual_counts(layers: int) -> list[int]:
    """1, 2, 4, … up to half of the layers."""
    return [k for k in (1, 2, 4, 8, 16, 32) if 2 * k <= layers] or [1]


def usual_intervals(layers: int, start: int) -> list[int]:
    """Every interval that switches at all, thinned where there are many, and the first that does not."""
    left = layers - start
    return [x for x in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if x < left] + [left]
