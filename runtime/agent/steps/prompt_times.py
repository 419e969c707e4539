"""Measure what tokens of prompts cost in a device's steps, for the scheduler's estimates of recomputing (QL-11).

A step's other rows would have run anyway: the mean time of the latest steps without prompts is subtracted. Only steps
with prompts of one stage are measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.agent.sequences.sequence import QueuedRow

#: Measured steps that are kept for the next report.
_REPORTED = 32
#: Share of the latest step in the mean time of steps without prompts.
_LATEST = 0.2


class PromptTimes:
    """The latest measurements of one device."""

    def __init__(self) -> None:
        self._decode = 0.0
        self._times: list[tuple[str, int, int, int]] = []

    def record_step(self, rows: Sequence[QueuedRow], busy: int) -> None:
        """Add a step that took `busy` ns."""
        prompts = [row for row in rows if row.tokens > 1]
        if not prompts:
            self._decode += (busy - self._decode) * (_LATEST if self._decode else 1.0)
            return
        stage = prompts[0].stage
        if len(self._times) >= _REPORTED or any(row.stage != stage for row in prompts):
            return
        beside = self._decode if len(prompts) < len(rows) else 0.0
        tokens, before = sum(row.tokens for row in prompts), max(row.start for row in prompts)
        if busy > beside:
            self._times.append((stage, tokens, before, int(busy - beside)))

    def drain(self) -> tuple[tuple[str, int, int, int], ...]:
        """Return (stage, tokens, tokens before them, ns) of the measured steps, each once."""
        times, self._times = tuple(self._times), []
        return times
