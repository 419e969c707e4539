"""The mixtures of two models at every point of Figures 10 and 11 of BlockLLM, as data. Pure functions.

A mixture has one letter per layer: `a` the first model, `b` the second, `s` the second's pruned stand-in. Embedding and
head are b's: a block in the figures is a decoding layer, and only layers are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zoo.errors import InputError

#: `b` is the model that is served, `a` the one with the shared blocks.
FIRST, SECOND, PRUNED = "a", "b", "s"
Experiment = Literal["sharing", "switching"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of layers.

    Fields:
        layers: One letter per layer.
        ends: Letter of the model of embedding and head.
    """

    layers: str
    ends: str = SECOND

    @property
    def code(self) -> str:
        """The mixture's name in files."""
        return f"{self.ends}:{self.layers}"


@dataclass(frozen=True, slots=True)
class MixturePoint:
    """One point of a line.

    Fields:
        line: "shared", "switched" or "pruned".
        size: Number of shared layers (sharing), or the layer after which models are switched (switching).
        at: First shared layer (sharing), or the number of layers between switches (switching).
    """

    line: str
    size: int
    at: int
    mixture: Mixture


def whole(layers: int, letter: str) -> Mixture:
    """Return the mixture of one model alone."""
    return Mixture(letter * layers, letter)


def sharing_points(layers: int, counts: Sequence[int], replaceable: str = "") -> list[MixturePoint]:
    """Return, for each count k and each start, k layers in a row from the first model, the rest from the second.

    This is BL-07.

    Args:
        replaceable: One letter per layer, `s` where a pruned stand-in exists. It adds a second line for each k, with
            stand-ins instead of the first model's layers.

    Raises:
        InputError: A count that the models do not have.
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
    """Return mixtures of the second model that switch models every x layers from layer `start` on (BL-08).

    After `start` come x layers of the second, x of the first, and so on. An interval that reaches the end gives the
    second model alone.

    Raises:
        InputError: A start that leaves no layer, or an interval below one.
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
    """Return the mixture; layers without a stand-in stay the second model's."""
    turn = [
        letter if layer >= start and (layer - start) // x % 2 and available[layer] == letter else SECOND
        for layer in range(layers)
    ]
    return Mixture("".join(turn))


def usual_counts(layers: int) -> list[int]:
    """Return 1, 2, 4, … up to half of the layers."""
    return [k for k in (1, 2, 4, 8, 16, 32) if 2 * k <= layers] or [1]


def usual_intervals(layers: int, start: int) -> list[int]:
    """Return every interval that switches at all, thinned out if there are many, and the first that does not."""
    left = layers - start
    return [x for x in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if x < left] + [left]
