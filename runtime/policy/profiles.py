"""Look up measured costs of blocks and links, by interpolation in tables (BL-11).

    profile = profile_of(document)                       # the JSON that `zoo profile` stores
    profile.block(digest).decode.at(batch=6, context=300)     -> seconds
    profile.link("host", "device").seconds(nbytes)

Values are interpolated linearly in the logarithm of the batch and linearly in the context. Beyond the last point they
continue with the last slope; below the first point they stay constant. More work never costs less: measured values
below an earlier one are raised to it. Pure functions without torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any


def _between(xs: Sequence[float], ys: Sequence[float], x: float, scale: Sequence[float], at: float) -> float:
    """Return y at x: interpolated in `scale`, where x lies at `at`, or extrapolated as in the module docstring."""
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
    """Hold seconds over one rising axis, such as bytes on a link or tokens of a prompt's chunk."""

    xs: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis(self.xs, len(self.seconds))

    def at(self, x: float) -> float:
        """Return the seconds at x."""
        return _between(self.xs, tuple(accumulate(self.seconds, max)), x, self.xs, x)


@dataclass(frozen=True, slots=True)
class Grid:
    """Hold seconds over batch and context.

    `seconds[i][j]` is the time for `batches[i]` rows that each attend to `contexts[j]` tokens.
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
        """Return the seconds of one step of `batch` rows at `context` tokens."""
        column = self._column(context)
        if batch > self.batches[-1]:
            return column[-1] + self._last_slope(context) * (batch - self.batches[-1])
        scale = [math.log2(each) for each in self.batches]
        return _between(self.batches, column, batch, scale, math.log2(batch) if batch > 0 else scale[0])

    def _column(self, context: float) -> tuple[float, ...]:
        """Return the seconds at each measured batch, at this context."""
        return tuple(accumulate((Line(self.contexts, row).at(context) for row in self.seconds), max))

    def _last_slope(self, context: float) -> float:
        """Return the seconds per row beyond the last batch.

        Slopes are taken at the measured contexts, made monotonic and interpolated, so that a longer context never costs
        less. A column interpolated between contexts may have its steepest slope in the middle.
        """
        if len(self.batches) == 1:
            return 0.0
        columns = [self._column(known) for known in self.contexts]
        width = self.batches[-1] - self.batches[-2]
        return Line(self.contexts, tuple((column[-1] - column[-2]) / width for column in columns)).at(context)


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """Hold the costs of one block.

    Fields:
        decode: Seconds of a step with one token per row.
        prefill: Seconds over the tokens of one prompt's chunk.
        load_seconds: Time to load it from a cold disk to the device.
        stands_for: The block that it is a surrogate of; None for a block of the chain itself.
    """

    block: str
    nbytes: int
    decode: Grid
    prefill: Line
    load_seconds: float
    stands_for: str | None = None


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Hold the time to move bytes from a to b."""

    a: str
    b: str
    line: Line

    def seconds(self, nbytes: float) -> float:
        return self.line.at(nbytes)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Hold everything that was measured on one device."""

    device: str
    blocks: tuple[BlockProfile, ...]
    links: tuple[LinkProfile, ...]

    def block(self, digest: str) -> BlockProfile:
        """Return a block's profile. Raises KeyError if it was not measured."""
        for each in self.blocks:
            if each.block == digest:
                return each
        raise KeyError(f"block {digest[:12]} was not measured on {self.device}")

    def link(self, a: str, b: str) -> LinkProfile:
        """Return a link's profile. Raises KeyError if it was not measured."""
        for each in self.links:
            if (each.a, each.b) == (a, b):
                return each
        raise KeyError(f"the link from {a} to {b} was not measured on {self.device}")


def chain_of(profile: DeviceProfile, name: str, blocks: Sequence[str]) -> BlockProfile:
    """Return the profile of a whole chain: the sum of its blocks' tables.

    Raises KeyError for a block that was not measured, ValueError for tables with different axes or an empty chain.
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
    """Return the profile of a part of a block, with a share `time` of its compute and a share `loaded` of its bytes."""
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
    """Resample all tables to the union of their points, so that they can be added."""
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
    """Parse a document of `zoo profile`. Raises KeyError, TypeError or ValueError for an invalid one."""
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
    """Parse {"64": 0.01, …}; JSON keys are text."""
    points = sorted((float(x), float(y)) for x, y in seconds.items())
    return Line(tuple(x for x, _ in points), tuple(y for _, y in points))


def _check_axis(axis: Sequence[float], values: int) -> None:
    if not axis or len(axis) != values or any(a >= b for a, b in pairwise(axis)):
        raise ValueError("a table needs a rising axis with a value at each point")
