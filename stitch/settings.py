"""Settings of a stitch's training, as data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stitch.points import StitchPoint
from zoo.errors import InputError

Precision = Literal["no", "bf16"]


@dataclass(frozen=True, slots=True)
class StitchSettings:
    """All settings that decide what is learned.

    Fields:
        points: None for all proportional ones.
        text: A source of `surgery.text.text`; None for the built-in text.
        rate: Peak learning rate.
        batch: Windows per step.
        length: Tokens per window.
        places: Unlocked points per step.
        windows: Training windows to draw.
        start: Windows for the least squares.
        measured: Windows for the scores.
        curriculum: Share of the steps in which points are unlocked from shallow to deep.
        kl: Weight of the divergence from B's distribution.
        cosine: Weight of one minus the cosine of the two distributions.
        state: Weight of the relative distance from B's own hidden state.
        labels: Weight of the negative log-likelihood of the text's own next tokens. At 0 only similarity to B counts;
            above, some of it is traded for accuracy.
        controls: Also train without the position.
    """

    points: tuple[StitchPoint, ...] | None = None
    text: str | None = None
    steps: int = 600
    rate: float = 2e-3
    batch: int = 4
    length: int = 128
    places: int = 2
    windows: int = 4096
    start: int = 64
    measured: int = 32
    curriculum: float = 0.3
    kl: float = 1.0
    cosine: float = 1.0
    state: float = 0.0
    labels: float = 0.0
    ridge: float = 1e-4
    clip: float = 1.0
    seed: int = 0
    controls: bool = False
    precision: Precision = "no"

    def check(self) -> None:
        """Raise InputError for impossible settings."""
        counts = (self.steps, self.batch, self.length - 1, self.places, self.windows, self.start, self.measured)
        if min(counts) < 1:
            raise InputError(
                "a stitch needs at least one step, one window per batch, one place per step, and windows of two "
                "tokens or more"
            )
        if not 0 < self.rate < 10 or not 0 <= self.curriculum <= 1 or not self.clip > 0 or not self.ridge >= 0:
            raise InputError(
                "the rate lies between 0 and 10, the curriculum between 0 and 1, clip above 0, ridge at 0 or above"
            )
        weights = (self.kl, self.cosine, self.state, self.labels)
        if min(weights) < 0 or not math.isfinite(sum(weights)) or sum(weights) == 0:
            raise InputError("the weights of the loss are 0 or above, and one of them is above")

    def document(self) -> dict[str, Any]:
        """Return the settings as JSON, the places as lists."""
        points = None if self.points is None else [[point.a_layer, point.b_layer, point.seen] for point in self.points]
        return {**asdict(self), "points": points}
