"""Plan which components run once for which models: the segments of a step over the chains of all its models (BL-15).

A *unit* is what a batch can share: a component without its adapter, named by its digest. Each model is a sequence of
units. The plan walks all sequences together, runs each shared unit once for all models that meet there, and joins units
that run back to back for the same models into one segment. Pure functions, without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from surgery.chains.plan import STITCH


@dataclass(frozen=True, slots=True)
class Segment:
    """Units that run back to back for the same models. `starts[i]`: where they start in the chain of `models[i]`."""

    models: tuple[str, ...]
    units: tuple[str, ...]
    starts: tuple[int, ...]


def plan_segments(chains: Mapping[str, Sequence[str]]) -> tuple[Segment, ...]:
    """Return the segments of a step, in an order that respects every chain.

    Args:
        chains: Units of each model, in order. Models keep the iteration order within a segment.

    Every model's units run exactly once and in order. A unit waits while another model that still needs it has not
    arrived at it. If all wait for each other (chains with two units in opposite orders), the unit that most models
    stand at runs first.
    """
    at = dict.fromkeys(chains, 0)
    left = {model: Counter(units) for model, units in chains.items()}
    wanted = Counter(unit for units in chains.values() for unit in set(units))
    segments: list[Segment] = []
    while any(at[model] < len(chains[model]) for model in chains):
        unit = _next_unit(chains, at, wanted)
        models = tuple(m for m in chains if at[m] < len(chains[m]) and chains[m][at[m]] == unit)
        _append(segments, models, unit, tuple(at[m] for m in models))
        for model in models:
            at[model] += 1
            left[model][unit] -= 1
            wanted[unit] -= left[model][unit] == 0
    return tuple(segments)


def cut_segment(segment: Segment, saves: Mapping[str, Collection[int]]) -> Iterator[Segment]:
    """Yield a segment in pieces that end before each unit of which the input is to be saved.

    Args:
        saves: By model, the indexes of these units in its chain.
    """
    count, bounds = len(segment.units), {0}
    for model, start in zip(segment.models, segment.starts, strict=True):
        bounds.update(at - start for at in saves.get(model, ()) if start < at < start + count)
    for lo, hi in pairwise([*sorted(bounds), count]):
        yield Segment(segment.models, segment.units[lo:hi], tuple(start + lo for start in segment.starts))


def _next_unit(chains: Mapping[str, Sequence[str]], at: Mapping[str, int], wanted: Mapping[str, int]) -> str:
    """Return the unit to run next: one that no other model will still arrive at, else the most wanted one.

    Ties are broken by model order. `wanted`: how many models have a unit before them. A model that arrives at a unit
    twice is not waited for: it must run it now first.
    """
    standing = Counter(chains[model][index] for model, index in at.items() if index < len(chains[model]))
    for unit, count in standing.items():
        if wanted[unit] == count:
            return unit
    return standing.most_common(1)[0][0]


def _append(segments: list[Segment], models: tuple[str, ...], unit: str, starts: tuple[int, ...]) -> None:
    """Extend the last segment if the same models go on from its end, else add a new one."""
    last = segments[-1] if segments else None
    if last is not None and last.models == models:
        ends = tuple(start + len(last.units) for start in last.starts)
        if ends == starts:
            segments[-1] = Segment(models, (*last.units, unit), last.starts)
            return
    segments.append(Segment(models, (unit,), starts))


def told_apart(kinds: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield ranges of a segment's units by their kinds: each stitch alone, the units between stitches together."""
    lo = 0
    for at, kind in enumerate(kinds):
        if kind == STITCH:
            if lo < at:
                yield lo, at
            yield at, at + 1
            lo = at + 1
    if lo < len(kinds):
        yield lo, len(kinds)
