"""How a stitch is trained, as data. Knows nothing of models."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stitch.points import StitchPoint
from zoo.errors import InputError

Precision = Literal["no", "bf16"]


@dataclass(frozen=True, slots=True)
class StitchSettings:
    """All that decides what is learned.

    `points`: None for all proportional ones. `text`: a source of `surgery.text.text`, None for the built-in text. Each
    step runs `batch` windows of `length` tokens through `places` of the unlocked points. `curriculum`: the share of the
    steps in which points are unlocked from shallow to deep. The loss is `kl` times the divergence from B's
    distribution, plus `cosine` times one minus the cosine of the two, plus `state` times the relative distance from B's
    own hidden state, plus `labels` times the negative log-likelihood of the text's own next tokens (0: likeness to B is
    all that counts; above, some of it is given for accuracy). `start`, `measured`: windows for the least squares and
    for the figures. `controls`: also train without the position.
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
        """Raises InputError for settings that cannot be."""
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
        """As JSON, the places as text."""
        points = None if self.points is None else [[point.a_layer, point.b_layer, point.seen] for point in self.points]
        return {**asdict(self), "points": points}
