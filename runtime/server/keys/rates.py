"""A bound on requests per minute, as a token bucket: pure, with the caller's clock."""

from __future__ import annotations

import math

_MINUTE = 60.0


class RequestBucket:
    """Admits `most` requests at once, and as many per minute.

    Args:
        now: Seconds of a monotonic clock, here and below.
    """

    def __init__(self, most: int, now: float) -> None:
        self.most = most
        self._level, self._at = float(most), now

    def take_request(self, now: float) -> int | None:
        """Count a request and return None; or the seconds, at least 1, after which one will be admitted."""
        rate = self.most / _MINUTE
        self._level = min(float(self.most), self._level + max(0.0, now - self._at) * rate)
        self._at = now
        if self._level >= 1.0:
            self._level -= 1.0
            return None
        return max(1, math.ceil((1.0 - self._level) / rate))
