"""The result of a comparison, as data and as the JSON of `zoo compare`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surgery.scoring.runs import Granularity, ScoredUnit


@dataclass(frozen=True, slots=True)
class ProbeInfo:
    """The probe that was used.

    Fields:
        digest: Digest of the ids.
        text: Digest of the text.
        source: Origin of the text.
        tokens: Tokens in all.
        window: Tokens per window.
    """

    digest: str
    text: str
    source: str
    tokens: int
    window: int


@dataclass(frozen=True)
class Score:
    """The score of one pair of parts; all values are means over tokens.

    Fields:
        similarity: Cosine of the distributions, in [0, 1].
        control: The same against the twin of b.
        metrics: `kl_ab`, `kl_ba` (nats), `agreement` (share of tokens with the same likeliest prediction), `hidden`
            (cosine of the hidden states, if widths agree).
    """

    a: ScoredUnit
    b: ScoredUnit
    similarity: float
    control: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class ScoreMatrix:
    """Scores of every part of a against every part of b.

    Fields:
        values: [parts of a][parts of b].
        control: The same against the twin of b.
    """

    a: tuple[ScoredUnit, ...]
    b: tuple[ScoredUnit, ...]
    values: tuple[tuple[float, ...], ...]
    control: tuple[tuple[float, ...], ...] | None


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two models."""

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
        """Return the JSON of `zoo compare`."""
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
    """Return layers [lo, hi), or components if those were compared."""
    span = unit.components if granularity == "component" else unit.layers
    return [span.lo, span.hi]
