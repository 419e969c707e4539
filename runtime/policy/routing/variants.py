"""Where a sequence's next hop runs: candidates, who of them may, and whom to choose (BL-13, BL-19 to BL-21, BL-28,
BL-29).

Candidates of a use of a block are its instances, ones that could be loaded, and for requests that allow it (`adaptive`)
instances of equivalent blocks and stitched ones, by their scores against the block that the chain names, and low-rank
deltas, which have no least score. Of those with room for the request

    latency    all are weighed together: the least latency (BL-21)
    accuracy   the best score first; the next best only where no instance of it keeps to `limit` seconds (BL-29)

and then, whatever came out, the instance that holds the sequence's K and V goes before it (BL-19): always (`strict`,
the paper's 5.3), or if it is no more than `margin` seconds slower (the paper's "same status", 5.1). By accuracy an
owner of a lower score does not.

A request that is not adaptive gets its own block, always. Pure: `latency` does the sums; the answer shows them all, and
why others are out.
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
    """An instance that could take the hop. `score`: agreement with the block that the chain names, 1 for that itself;
    `owner`: it holds the sequence's K and V; `room`: its memory can take the request."""

    candidate: Candidate
    kind: Kind = "own"
    score: float = 1.0
    owner: bool = False
    room: bool = True


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """`equivalent` and `stitched`: the least scores. `margin` and `limit` in seconds; no limit means that accuracy is
    never given up.
    """

    prefer: Literal["latency", "accuracy"] = "latency"
    equivalent: float = 0.98
    stitched: float = 0.95
    strict: bool = False
    margin: float = 0.0
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Rated:
    """An option with its terms. `out`: why it could not be chosen, empty if it could."""

    option: Option
    latency: Latency
    out: str = ""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The choice and the rule that made it; all options in the order given."""

    chosen: Option
    rule: Rule
    rated: tuple[Rated, ...]

    @property
    def exact(self) -> bool:
        """Whether the chain's own block runs."""
        return self.chosen.kind == "own"


@dataclass(frozen=True, slots=True)
class Nowhere:
    """No option may take the hop now."""

    rated: tuple[Rated, ...]


def dispatch(options: Sequence[Option], work: RowWork, adaptive: bool, limits: DispatchLimits) -> Dispatch | Nowhere:
    """Choose for one hop. Of equals the first."""
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
    """The fastest of the best score that keeps to the limit; if none of any score does, the fastest of all."""
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
