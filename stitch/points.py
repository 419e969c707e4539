"""The places of a stitch: after a layer of A, before a layer of B. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from surgery.chains.stitches import stitch_position
from zoo.errors import InputError

_POINT = re.compile(r"\s*(\d{1,6})\s*:\s*(\d{1,6})\s*")
#: By default one place in this many is not trained on.
_HELD_OUT = 3


@dataclass(frozen=True, slots=True, order=True)
class StitchPoint:
    """A place: layers [0, a_layer] of A, the stitch, layers [b_layer, end) of B; both counted from 0.

    Fields:
        seen: It is trained on.
    """

    a_layer: int
    b_layer: int
    seen: bool = True

    @property
    def position(self) -> float:
        """The position input of the stitch at this place (BL-09)."""
        return stitch_position(self.a_layer, self.b_layer)

    def __str__(self) -> str:
        return f"{self.a_layer}:{self.b_layer}"


def proportional(layers_a: int, layers_b: int) -> tuple[StitchPoint, ...]:
    """Return, for every layer of A, the place before the layer of B at the nearest depth, from shallow to deep.

    A layer of A after which nothing of B would remain has none. Every third place is kept out of training, but never
    the shallowest or the deepest, so that the stitch has to interpolate there.
    """
    at = [(layer, (2 * (layer + 1) * layers_b + layers_a) // (2 * layers_a)) for layer in range(layers_a)]
    inside = [(a, b) for a, b in at if b < layers_b]
    return tuple(StitchPoint(a, b, seen=k % _HELD_OUT != 1 or k == len(inside) - 1) for k, (a, b) in enumerate(inside))


def parse_points(text: str, seen: bool = True) -> tuple[StitchPoint, ...]:
    """Parse `1:2,3:4`: after layer 1 of A before layer 2 of B, and so on. Raises InputError."""
    points = []
    for part in text.split(","):
        match = _POINT.fullmatch(part)
        if match is None:
            raise InputError(
                f"{part.strip()[:40]!r} is no place for a stitch: write LAYER_OF_A:LAYER_OF_B, as in 1:2,3:4"
            )
        points.append(StitchPoint(int(match[1]), int(match[2]), seen))
    return tuple(points)


def choose_points(given: Sequence[StitchPoint] | None, layers_a: int, layers_b: int) -> tuple[StitchPoint, ...]:
    """Return the given places, or all proportional ones, from shallow to deep.

    Raises:
        InputError: A place is outside the models or named twice, or none is left to train on.
    """
    points = tuple(sorted(given)) if given else proportional(layers_a, layers_b)
    for point in points:
        if point.a_layer >= layers_a or point.b_layer >= layers_b:
            raise InputError(
                f"there is no place {point}: the models have {layers_a} and {layers_b} layers, counted from 0"
            )
    if len({(point.a_layer, point.b_layer) for point in points}) < len(points):
        raise InputError("a place for the stitch is named twice")
    if not any(point.seen for point in points):
        raise InputError(f"models of {layers_a} and {layers_b} layers leave the stitch no place to be trained at")
    return points
