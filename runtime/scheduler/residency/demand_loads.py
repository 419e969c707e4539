"""How long loads on demand have taken: of each stage that is there, and on average. Times in ns."""

from __future__ import annotations

from runtime.chains import Stage
from runtime.scheduler.residency.waiters import SwapCounts

#: Weight of the latest load in the means.
_WEIGHT = 0.2


class DemandLoads:
    """The loads on demand of one cluster, and their totals."""

    def __init__(self) -> None:
        self._began: dict[tuple[str, Stage], tuple[int, int]] = {}
        self._ended: dict[tuple[str, Stage], tuple[int, int]] = {}
        self._rate = 0.0
        #: Mean duration of a load.
        self.duration = 0.0
        self.counts = SwapCounts()

    def begin(self, device: str, stage: Stage, nbytes: int, now: int) -> None:
        """Record that a stage is requested of which a device lacks so many bytes."""
        self._began[device, stage] = now, nbytes

    def end(self, device: str, stage: Stage, now: int) -> bool:
        """Record that a stage is loaded; return whether that was on demand."""
        began = self._began.pop((device, stage), None)
        if began is None:
            return False
        since, nbytes = began
        took = now - since
        self.counts.loads += 1
        self.counts.loaded_bytes += nbytes
        self.counts.load_ns += took
        self._ended[device, stage] = now, took
        if nbytes and took > 0:
            self._rate = _mean(self._rate, nbytes / took)
            self.duration = _mean(self.duration, took)
        return True

    def expected(self, nbytes: int) -> float:
        """Return the duration of a load of so many bytes by the mean rate; 0 before the first load."""
        return nbytes / self._rate if self._rate else 0.0

    def latest(self, device: str, stage: Stage | None) -> tuple[int, int]:
        """Return when the latest load of a stage that is there ended, and how long it took; zeros if it is unknown."""
        return (0, 0) if stage is None else self._ended.get((device, stage), (0, 0))

    def drop_stage(self, device: str, stage: Stage) -> None:
        """Forget a stage that has left."""
        self._ended.pop((device, stage), None)

    def remove_device(self, device: str) -> None:
        """Forget a device that has died."""
        self._began = {key: each for key, each in self._began.items() if key[0] != device}
        self._ended = {key: each for key, each in self._ended.items() if key[0] != device}


def _mean(mean: float, latest: float) -> float:
    return (1 - _WEIGHT) * mean + _WEIGHT * latest if mean else latest
