"""Measure how long rows were on the way from another device, for the scheduler's estimates (BL-21).

Only rows that came while this device waited are counted: any others also waited for its step, which the estimates count
as queueing. The sender's clock is this device's where both are on one machine; the scheduler ignores other pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.chains import Array
from runtime.messages import ForwardRows

#: Hops that are kept between two reports: a sample, since the scheduler fits its costs to each of them.
_MOST = 8


class HopTimes:
    """Hops since the last report."""

    def __init__(self) -> None:
        self._hops: list[tuple[str, int, int, bool]] = []

    def record(self, source: str, rows: ForwardRows, arrays: Sequence[Array], in_full: bool, now: int) -> None:
        """Record rows that came from `source` and did not wait for a step here.

        `in_full`: not a message of a batch that this device already runs; those are short and built beforehand.
        """
        if rows.sent < now and len(self._hops) < _MOST:
            self._hops.append((source, sum(len(each.data) for each in arrays), now - rows.sent, in_full))

    def drain(self) -> tuple[tuple[str, int, int, bool], ...]:
        """Return (source, bytes, nanoseconds, whether in full) of each hop since the last call."""
        hops, self._hops = tuple(self._hops), []
        return hops
