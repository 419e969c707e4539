"""What blocks and links were measured to cost, as tables that policies read (BL-11): pure look-up and interpolation.

    profile = profile_of(document)                       # the JSON that `zoo profile` stores
    profile.block(digest).decode.at(batch=6, context=300)     -> seconds
    profile.link("host", "device").seconds(nbytes)

Between measured points values are interpolated, linearly in the logarithm of the batch and linearly in the context;
beyond the last one they go on along the last slope; below the first they stay. More work never costs less: noise that
says so is raised to what is before it. Knows no clock, no device and no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any


def _between(xs: Sequence[float], ys: Sequence[float], x: float, scale: Sequence[float], at: float) -> float:
    """y at x: inside by `scale` (xs in the measure that is interpolated in, `at` being x's), outside as the top of the
    file says.
    """
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    if x >= xs[-1]:
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        return ys[-1] + max(slope, 0.0) * (x - xs[-1])
    hi = bisect_right(xs, x)
    share = (at - scale[hi - 1]) / (scale[hi] - scale[hi - 1])
    return ys[hi - 1] + share * (ys[hi] - ys[hi - 1])


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds over one rising axis: bytes on a link, tokens of a prompt's chunk."""

    xs: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis(self.xs, len(self.seconds))

    def at(self, x: float) -> float:
        """Seconds at x."""
        return _between(self.xs, tuple(accumulate(self.seconds, max)), x, self.xs, x)


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds over batch and context. `seconds[i][j]`: at `batches[i]` rows that each attend to `contexts[j]`
    tokens.
    """

    batches: tuple[float, ...]
    contexts: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        _check_axis(self.batches, len(self.seconds))
        for row in self.seconds:
            _check_axis(self.contexts, len(row))
        if self.batches[0] <= 0:
            raise ValueError("batch sizes are positive")

    def at(self, batch: float, context: float) -> float:
        """Seconds of one step of `batch` rows at `context` tokens."""
        column = self._column(context)
        if batch > self.batches[-1]:
            return column[-1] + self._last_slope(context) * (batch - self.batches[-1])
        scale = [math.log2(each) for each in self.batches]
        return _between(self.batches, column, batch, scale, math.log2(batch) if batch > 0 else scale[0])

    def _column(self, context: float) -> tuple[float, ...]:
        """Seconds at each measured batch, at this context."""
        return tuple(accumulate((Line(self.contexts, row).at(context) for row in self.seconds), max))

    def _last_slope(self, context: float) -> float:
        """Seconds per row beyond the last batch. It is known where contexts were measured, and never falls with them
        (as no Line does), or a longer context could cost less there; between them it is not a column's own, which may
        be steepest in the middle."""
        if len(self.batches) == 1:
            return 0.0
        columns = [self._column(known) for known in self.contexts]
        width = self.batches[-1] - self.batches[-2]
        return Line(self.contexts, tuple((column[-1] - column[-2]) / width for column in columns)).at(context)


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """One block. `decode`: a token for each of some rows; `prefill`: one prompt's tokens; `load_seconds`: from disk,
    cold, to the device.

    `stands_for`: the block that it is a surrogate of, None for a block of the chain itself.
    """

    block: str
    nbytes: int
    decode: Grid
    prefill: Line
    load_seconds: float
    stands_for: str | None = None


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Moving bytes from a to b."""

    a: str
    b: str
    line: Line

    def seconds(self, nbytes: float) -> float:
        return self.line.at(nbytes)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """All that was measured on one device."""

    device: str
    blocks: tuple[BlockProfile, ...]
    links: tuple[LinkProfile, ...]

    def block(self, digest: str) -> BlockProfile:
        """Raises KeyError for a block that was not measured."""
        for each in self.blocks:
            if each.block == digest:
                return each
        raise KeyError(f"block {digest[:12]} was not measured on {self.device}")

    def link(self, a: str, b: str) -> LinkProfile:
        """Raises KeyError for a link that was not measured."""
        for each in self.links:
            if (each.a, each.b) == (a, b):
                return each
        raise KeyError(f"the link from {a} to {b} was not measured on {self.device}")


def chain_of(profile: DeviceProfile, name: str, blocks: Sequence[str]) -> BlockProfile:
    """A whole chain as one block: its blocks' tables added up.

    Raises KeyError for a block that was not measured, ValueError for tables of different axes or a chain of none.
    """
    found = [profile.block(digest) for digest in blocks]
    axes = {(each.decode.batches, each.decode.contexts, each.prefill.xs) for each in found}
    if len(axes) != 1:
        raise ValueError("only tables of the same axes can be added up")
    batches, contexts, chunks = next(iter(axes))
    rows = zip(*(each.decode.seconds for each in found), strict=True)
    seconds = tuple(tuple(math.fsum(values) for values in zip(*row, strict=True)) for row in rows)
    prefill = Line(
        chunks, tuple(math.fsum(values) for values in zip(*(each.prefill.seconds for each in found), strict=True))
    )
    load = math.fsum(each.load_seconds for each in found)
    return BlockProfile(name, sum(each.nbytes for each in found), Grid(batches, contexts, seconds), prefill, load)


def part_of(whole: BlockProfile, name: str, time: float, loaded: float) -> BlockProfile:
    """A piece of a block that has a share `time` of what it computes, and a share `loaded` of its bytes."""
    decode = Grid(
        whole.decode.batches,
        whole.decode.contexts,
        tuple(tuple(time * each for each in row) for row in whole.decode.seconds),
    )
    prefill = Line(whole.prefill.xs, tuple(time * each for each in whole.prefill.seconds))
    return BlockProfile(
        name, round(loaded * whole.nbytes), decode, prefill, loaded * whole.load_seconds, whole.stands_for
    )


def alike(blocks: Sequence[BlockProfile]) -> tuple[BlockProfile, ...]:
    """The same tables over all points of all of them, so that they can be added up."""
    batches = _union(each.decode.batches for each in blocks)
    contexts = _union(each.decode.contexts for each in blocks)
    chunks = _union(each.prefill.xs for each in blocks)

    def at_all(each: BlockProfile) -> BlockProfile:
        decode = Grid(
            batches, contexts, tuple(tuple(each.decode.at(batch, context) for context in contexts) for batch in batches)
        )
        return replace(each, decode=decode, prefill=Line(chunks, tuple(each.prefill.at(chunk) for chunk in chunks)))

    return tuple(at_all(each) for each in blocks)


def _union(axes: Iterable[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sorted({point for axis in axes for point in axis}))


def profile_of(document: Mapping[str, Any]) -> DeviceProfile:
    """The tables in a document of `zoo profile`. Raises KeyError, TypeError or ValueError for one that is none."""
    return DeviceProfile(
        device=str(document["device"]),
        blocks=tuple(_block(each) for each in document["blocks"]),
        links=tuple(LinkProfile(each["a"], each["b"], _line(each["seconds"])) for each in document["links"]),
    )


def _block(value: Mapping[str, Any]) -> BlockProfile:
    decode = value["decode"]
    grid = Grid(tuple(decode["batches"]), tuple(decode["contexts"]), tuple(tuple(row) for row in decode["seconds"]))
    stands_for = value.get("surrogate_of")
    return BlockProfile(
        value["block"], int(value["bytes"]), grid, _line(value["prefill"]), float(value["load_seconds"]), stands_for
    )


def _line(seconds: Mapping[str, float]) -> Line:
    """{"64": 0.01, …}: JSON's keys are text."""
    points = sorted((float(x), float(y)) for x, y in seconds.items())
    return Line(tuple(x for x, _ in points), tuple(y for _, y in points))


def _check_axis(axis: Sequence[float], values: int) -> None:
    if not axis or len(axis) != values or any(a >= b for a, b in pairwise(axis)):
        raise ValueError("a table needs a rising axis with a value at each point")
