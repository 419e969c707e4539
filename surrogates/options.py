"""Options for making a stand-in, and the report on it. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field

from surrogates.pruning.groups import Part
from surrogates.pruning.importance import Importance
from surrogates.pruning.plan import PrunePlan, check_ratio
from surrogates.recovery.recover import Recovery, RecoverySettings
from surrogates.scoring.agreement import Agreement
from surrogates.scoring.timing import Speed, TimingSettings
from zoo.errors import InputError


@dataclass(frozen=True)
class SurrogateOptions:
    """How a stand-in is made.

    Fields:
        ratio: Share of the block's parameters to remove.
        windows: Training windows of `length` tokens.
        held_out: Windows for measuring only.
        scored: Windows for importance scores.
        device: "auto" uses an accelerator if there is one.
    """

    part: Part = "layer"
    ratio: float = 0.5
    importance: Importance = "taylor"
    refit: bool = True
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    text: str | None = None
    windows: int = 256
    length: int = 128
    held_out: int = 64
    scored: int = 64
    seed: int = 0
    name: str | None = None
    device: str = "auto"
    timing: TimingSettings = field(default_factory=TimingSettings)

    def check(self) -> None:
        """Raise InputError for impossible options."""
        check_ratio(self.ratio)
        self.recovery.check()
        if min(self.windows, self.held_out, self.scored) < 1 or self.length < 2:
            raise InputError("a surrogate needs at least one window of two tokens to learn from and one to measure on")


@dataclass(frozen=True)
class SurrogateReport:
    """The surrogate that was made.

    Fields:
        probe: Digest of the held-out text that the scores were measured on.
        recovery: None without recovery.
    """

    surrogate: str
    parent: str
    layers: tuple[int, int]
    part: str
    removed_ratio: float
    agreement: Agreement
    speed: Speed
    probe: str
    bytes_new: int
    seconds: float
    exportable: bool
    reason: str | None
    plan: PrunePlan | None = None
    recovery: Recovery | None = None

    @property
    def similarity(self) -> float:
        """Similarity after the block, on held-out text (Table 4)."""
        return self.agreement.block

    @property
    def speedup(self) -> float:
        """Speedup of the block in decoding."""
        return self.speed.decode.median
