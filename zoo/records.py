"""What was found out about models, as frozen data: scored pairs of runs, and documents. Pure; no torch, no tables.

A *run* is components [lo, hi) of a model's chain. A scored pair names what it was scored on, so that a score is never
read without its ground (BL-06). This file knows nothing of how scores come about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: `equivalent`: symmetric, not transitive. `surrogate`: b is a cheaper stand-in of a. `delta`: b is a low-rank
#: rewriting of a.
Relation = Literal["equivalent", "surrogate", "delta"]


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """Components [lo, hi) of a model's chain."""

    model: str
    lo: int
    hi: int


@dataclass(frozen=True)
class Equivalence:
    """Two runs and how alike their outputs are.

    `probe`: digest of the probe set (its text and tokens) that they were scored on. `similarity`: the mean over tokens
    of the cosine of vocabulary distributions (BL-05), in [0, 1]. `control`: the same score against a random-init twin
    of b, None where it was not taken.
    `metrics`: any further scores by name.
    """

    relation: Relation
    a: ScoredRun
    b: ScoredRun
    probe: str
    similarity: float
    control: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Document:
    """A result kept whole, as JSON: an evaluation, a profile, a curve. One per (kind, model, key)."""

    kind: str
    model: str
    key: str
    value: Any
