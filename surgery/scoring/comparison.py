"""The outcome of a comparison, as data and as the JSON of `zoo compare`. Pure: knows nothing of how scores come
about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surgery.scoring.runs import Granularity, ScoredUnit


@dataclass(frozen=True, slots=True)
class ProbeInfo:
    """What was measured on: digests of the ids and of the text, where the text came from, tokens in all and per
    window.
    """

    digest: str
    text: str
    source: str
    tokens: int
    window: int


@dataclass(frozen=True)
class Score:
    """One pair of parts. `similarity`, `control`: mean over tokens of the cosine of distributions, in [0, 1].

    `metrics`: `kl_ab`, `kl_ba` (nats per token), `agreement` (share of tokens where both would say the same next),
    `hidden` (cosine of the hidden states, where widths agree), means over tokens.
    """

    a: ScoredUnit
    b: ScoredUnit
    similarity: float
    control: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class ScoreMatrix:
    """Every part of a against every part of b: `values` [parts of a][parts of b]; `control`: the same against the twin
    of b.
    """

    a: tuple[ScoredUnit, ...]
    b: tuple[ScoredUnit, ...]
    values: tuple[tuple[float, ...], ...]
    control: tuple[tuple[float, ...], ...] | None


@dataclass(frozen=True)
class Comparison:
    """What was found out about two models."""

    a: str
    b: str
    probe: ProbeInfo
    granularity: Granularity
    pairs: tuple[Score, ...]
    matrix: ScoreMatrix | None
    seconds: float

    @property
    def mean(self) -> float:
        return sum(pair.similarity for pair in self.pairs) / len(self.pairs)

    @property
    def control(self) -> float | None:
        """Mean of the pairs' controls."""
        known = [pair.control for pair in self.pairs if pair.control is not None]
        return sum(known) / len(known) if known else None

    def document(self) -> dict[str, Any]:
        """The JSON of `zoo compare`."""
        document = {
            "a": self.a,
            "b": self.b,
            "probe": {
                "sha": self.probe.digest,
                "tokens": self.probe.tokens,
                "window": self.probe.window,
                "text": self.probe.text,
                "source": self.probe.source,
            },
            "granularity": self.granularity,
            "pairs": [_pair_document(pair, self.granularity) for pair in self.pairs],
            "mean": self.mean,
            "control": self.control,
            "seconds": self.seconds,
        }
        if self.matrix is not None:
            document["matrix"] = {
                "a": [_bounds(unit, self.granularity) for unit in self.matrix.a],
                "b": [_bounds(unit, self.granularity) for unit in self.matrix.b],
                "similarity": self.matrix.values,
                "control": self.matrix.control,
            }
        return document


def _pair_document(pair: Score, granularity: Granularity) -> dict[str, Any]:
    return {
        "a": _bounds(pair.a, granularity),
        "b": _bounds(pair.b, granularity),
        "similarity": pair.similarity,
        "control": pair.control,
        "metrics": dict(pair.metrics),
        "components": {side: [unit.components.lo, unit.components.hi] for side, unit in (("a", pair.a), ("b", pair.b))},
    }


def _bounds(unit: ScoredUnit, granularity: Granularity) -> list[int]:
    """Layers [lo, hi), or components where those were compared."""
    span = unit.components if granularity == "component" else unit.layers
    return [span.lo, span.hi]
