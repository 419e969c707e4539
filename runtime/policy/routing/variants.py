"""Choose where a sequence's next hop runs: on instances of its block or of variants.

Implements BL-13, BL-19 to BL-21, BL-28 and BL-29. The candidates for a block are its instances, instances that could be
loaded, and, for requests that allow it (`adaptive`), instances of equivalent and stitched blocks, by their scores
against the chain's own block, and low-rank deltas, which have no least score. Among those with room for the request the
preference decides:

    latency    the least latency of all (BL-21)
    accuracy   the best score; a lower score only if no instance of the better one keeps to `limit` seconds (BL-29)

The instance that holds the sequence's K and V (the owner) takes precedence over the result (BL-19): always with
`strict` (the paper's 5.3), otherwise if it is at most `margin` seconds slower (the paper's "same status", 5.1). With
`accuracy`, an owner of a lower score does not.

A request that is not adaptive always gets its own block. Pure functions on `latency`; the result contains all terms,
and why each other candidate was excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.policy.routing.latency import Candidate, Latency, RowWork, latency_of

Kind = Literal["own", "equivalent", "stitched", "delta"]
Rule = Literal["owner", "latency", "accuracy"]


@dataclass(frozen=True, slots=True)
class Option:
    """Describe an instance that could run the hop.

    Fields:
        score: Agreement with the block that the chain names; 1 for that block itself.
        owner: It holds the sequence's K and V.
        room: Its memory can take the request.
    """

    candidate: Candidate
    kind: Kind = "own"
    score: float = 1.0
    owner: bool = False
    room: bool = True


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Configure the choice.

    Fields:
        equivalent, stitched: Least scores of equivalent and stitched blocks.
        margin: Seconds by which an owner may be slower.
        limit: Longest latency in seconds for the better score; None: accuracy is never given up.
    """

    prefer: Literal["latency", "accuracy"] = "latency"
    equivalent: float = 0.98
    stitched: float = 0.95
    strict: bool = False
    margin: float = 0.0
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Rated:
    """Hold an option with its latency. `out`: why it could not be chosen; empty if it could."""

    option: Option
    latency: Latency
    out: str = ""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Hold the choice and the rule that made it, with all options in the order given."""

    chosen: Option
    rule: Rule
    rated: tuple[Rated, ...]

    @property
    def exact(self) -> bool:
        """Return whether the chain's own block runs."""
        return self.chosen.kind == "own"


@dataclass(frozen=True, slots=True)
class Nowhere:
    """Report that no option can run the hop now."""

    rated: tuple[Rated, ...]


def dispatch(options: Sequence[Option], work: RowWork, adaptive: bool, limits: DispatchLimits) -> Dispatch | Nowhere:
    """Choose an option for one hop; of equals the first."""
    rated = tuple(Rated(each, latency_of(each.candidate, work), _why_out(each, adaptive, limits)) for each in options)
    able = [each for each in rated if not each.out]
    if not able:
        return Nowhere(rated)
    best = _most_accurate(able, limits.limit) if limits.prefer == "accuracy" else min(able, key=_seconds)
    owner = min((each for each in able if each.option.owner), key=_seconds, default=None)
    if owner is not None and (limits.strict or _goes_before(owner, best, limits)):
        return Dispatch(owner.option, "owner", rated)
    return Dispatch(best.option, limits.prefer, rated)


def _why_out(option: Option, adaptive: bool, limits: DispatchLimits) -> str:
    if option.kind != "own":
        least = {"equivalent": limits.equivalent, "stitched": limits.stitched, "delta": 0.0}[option.kind]
        if not adaptive:
            return "the request is exact"
        if not option.score >= least:
            return f"its score {option.score:.4f} is under {least:g}"
    return "" if option.room else "no room"


def _most_accurate(able: Sequence[Rated], limit: float | None) -> Rated:
    """Return the fastest option of the best score that keeps to the limit, or the fastest of all if none does."""
    for score in sorted({each.option.score for each in able}, reverse=True):
        best = min((each for each in able if each.option.score == score), key=_seconds)
        if limit is None or best.latency.total <= limit:
            return best
    return min(able, key=_seconds)


def _goes_before(owner: Rated, best: Rated, limits: DispatchLimits) -> bool:
    accurate = limits.prefer == "latency" or owner.option.score >= best.option.score
    return accurate and owner.latency.total <= best.latency.total + limits.margin


def _seconds(rated: Rated) -> float:
    return rated.latency.total
