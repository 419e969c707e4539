"""Plan what to remove from a run of layers: how many heads and channels stay, and which. Pure: no torch, no files.

    counts = nearest(shape, part, 0.5, cost)                 # the feasible counts with the removed share nearest to the
                                                             ratio
    plan = PrunePlan(…, tuple(choose(shape, counts, scores) for scores in …))

Feasible counts are those that transformers accepts and a layer can compute: equally many query heads per key-value
head, the model's width a multiple of the heads (Llama's and NeoX's configs require it), and channels in steps suited to
kernels. All layers of a run get the same counts; each keeps its own best units.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from surrogates.pruning.groups import Part, Unit
from zoo.errors import InputError


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of a layer's parts.

    Fields:
        heads: Query heads.
        kv: Key-value heads; each serves heads / kv query heads.
        channels: Inner width of the ffn.
    """

    hidden: int
    heads: int
    kv: int
    head_dim: int
    channels: int

    def units(self, unit: Unit) -> int:
        """Return the number of units of a kind."""
        return {"heads": self.heads, "kv": self.kv, "channels": self.channels}[unit]


@dataclass(frozen=True, slots=True)
class KeptSlices:
    """Units that stay in one layer, ascending, by their old index."""

    heads: tuple[int, ...]
    kv: tuple[int, ...]
    channels: tuple[int, ...]

    def units(self, unit: Unit) -> tuple[int, ...]:
        return {"heads": self.heads, "kv": self.kv, "channels": self.channels}[unit]


@dataclass(frozen=True, slots=True)
class SliceScores:
    """Importance of each unit of one layer; more is better. Lengths are the shape's counts."""

    heads: Sequence[float]
    kv: Sequence[float]
    channels: Sequence[float]


@dataclass(frozen=True)
class PrunePlan:
    """A plan.

    Fields:
        layers: Index of the first and the last layer, inclusive.
        ratio: Requested share of parameters to remove.
        parameters: The block's parameters.
        removed: Parameters that are removed.
        kept: Per layer.
    """

    part: Part
    layers: tuple[int, int]
    ratio: float
    before: BlockShape
    after: BlockShape
    parameters: int
    removed: int
    kept: tuple[KeptSlices, ...]

    @property
    def removed_ratio(self) -> float:
        return self.removed / self.parameters

    def document(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        kept = [{"layer": self.layers[0] + at, **asdict(each)} for at, each in enumerate(self.kept)]
        return {**asdict(self), "removed_ratio": self.removed_ratio, "kept": kept}


def parse_layers(text: str) -> tuple[int, int]:
    """Parse `4-6` -> (4, 6): layers counted from 0, both ends inclusive; `4` is `4-4`. Raises InputError."""
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text.strip())
    if match is None:
        raise InputError(
            f"--layers {text[:40]!r} is no run of layers: write LO-HI, counted from 0, both included (4-6 is three "
            "layers)"
        )
    lo, hi = int(match[1]), int(match[2] or match[1])
    if hi < lo:
        raise InputError(f"--layers {text}: the run ends before it begins")
    return lo, hi


def check_layers(layers: tuple[int, int], count: int, model: str) -> None:
    """Raise InputError for layers that a model does not have."""
    lo, hi = layers
    if not 0 <= lo <= hi:
        raise InputError(f"layers {lo}-{hi} are no run of layers")
    if hi >= count:
        raise InputError(f"{model} has layers 0-{count - 1}; layers {lo}-{hi} reach beyond them")


def check_ratio(ratio: float) -> None:
    """Raise InputError unless 0 < ratio < 1."""
    if not 0.0 < ratio < 1.0:
        raise InputError(
            f"the ratio must be a share between 0 and 1, not {ratio:g}: 0.5 removes half of the block's parameters"
        )


# -- how many ----------------------------------------------------------------------------------------------------------

#: Parameters of a run of layers with these counts.
Cost = Callable[[BlockShape], int]


def nearest(shape: BlockShape, part: Part, ratio: float, cost: Cost) -> BlockShape:
    """Return the feasible counts with the removed share of parameters nearest to `ratio`.

    On a tie, the counts with more key-value heads win. For a whole layer the heads are chosen first, by the attention's
    own share, and the channels compensate for the rest.

    Raises:
        InputError: Nothing can be removed, since one head or too few channels are left already.
    """
    after = shape
    if part != "ffn":
        aim = ratio * cost(_with(shape, channels=0))
        after = _closest(
            _fewer_heads(shape),
            lambda each: cost(shape) - cost(each),
            aim,
            "the attention cannot be pruned: too few heads",
        )
    if part != "attention":
        fewer = (_with(after, channels=count) for count in _fewer_channels(shape.channels))
        after = _closest(
            fewer,
            lambda each: cost(shape) - cost(each),
            ratio * cost(shape),
            "the ffn cannot be pruned: too few channels",
        )
    return after


def _closest(candidates: Iterator[BlockShape], removed: Cost, aim: float, complaint: str) -> BlockShape:
    found = min(
        candidates, key=lambda each: (abs(removed(each) - aim), -each.kv, -each.heads, -each.channels), default=None
    )
    if found is None:
        raise InputError(complaint)
    return found


def _with(shape: BlockShape, **counts: int) -> BlockShape:
    return BlockShape(**{**asdict(shape), **counts})


def _fewer_heads(shape: BlockShape) -> Iterator[BlockShape]:
    """Yield every feasible count of heads below the shape's own: `kv` groups of `group` query heads each."""
    group = shape.heads // shape.kv
    for kv in range(shape.kv, 0, -1):
        for each in range(group, 0, -1):
            if kv * each < shape.heads and shape.hidden % (kv * each) == 0:
                yield _with(shape, heads=kv * each, kv=kv)


def channel_step(channels: int) -> int:
    """Return the step of channel counts: a power of two up to 64 that divides the count into at least 16 steps."""
    step = 1
    while step < 64 and channels % (2 * step) == 0 and channels // (2 * step) >= 16:
        step *= 2
    return step


def _fewer_channels(channels: int) -> range:
    step = channel_step(channels)
    return range(step, channels, step)


# -- which -------------------------------------------------------------------------------------------------------------


def choose(shape: BlockShape, after: BlockShape, scores: SliceScores) -> KeptSlices:
    """Return the units with the highest scores, as many as `after` has. Among equal units the first stays.

    Key-value heads are removed with all their query heads, by the sum of their scores. If `after` has fewer query heads
    per group, the lowest of each remaining group are removed too.
    """
    group, left = shape.heads // shape.kv, after.heads // after.kv
    totals = [scores.kv[at] + sum(scores.heads[at * group : (at + 1) * group]) for at in range(shape.kv)]
    kv = _best(totals, range(shape.kv), after.kv)
    heads = [head for at in kv for head in _best(scores.heads, range(at * group, (at + 1) * group), left)]
    return KeptSlices(tuple(heads), kv, _best(scores.channels, range(shape.channels), after.channels))


def _best(scores: Sequence[float], among: range, count: int) -> tuple[int, ...]:
    return tuple(sorted(sorted(among, key=lambda at: (-scores[at], at))[:count]))
