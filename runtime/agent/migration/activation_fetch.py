"""What the front of one move recomputes from, where that is hidden states which the source kept: asked for, checked,
and used in order.

    ask --Want--> source --Pages--> arrived --CheckInputs--> checked --> take: the row that recomputes it --> ran

Contract: spans belong to the front from when they are asked for (`policy.migration.two_ended`): inputs travel only for
what is recomputed. The next ones travel while a row runs. What does not come, or does not verify, is told to be lost;
after a few of those, and when the source is gone, nothing more is asked for. Sends nothing, and decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.agent.migration.activation_cache import size_of
from runtime.chains import Array

#: Spans whose inputs did not come, or did not verify, after which the front gives up.
_FAILURES = 4


@dataclass(slots=True)
class Portion:
    """Tokens of `span` from `start` on; before it they are there. `array`: None until it has come; `checked`: it may be
    used.
    """

    span: range
    start: int
    array: Array | None = None
    checked: bool = False


@dataclass(frozen=True, slots=True)
class FetchedSpan:
    """What a row recomputes: tokens from `start` to the end of `span`."""

    span: range
    start: int
    array: Array


class ActivationFetch:
    """`before`: the component that the hidden states came into. `nbytes`: that came; `reason`: why some did not, the
    latest.
    """

    def __init__(self, before: int) -> None:
        self.before = before
        self.nbytes = 0
        self.reason = ""
        self._portions: list[Portion] = []
        self._failures = _FAILURES
        self._running: range | None = None

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing more can come."""
        return self._failures <= 0

    @property
    def claimed_count(self) -> int:
        """Spans that are the front's, the one that runs among them."""
        return len(self._portions) + (self._running is not None)

    @property
    def behind(self) -> int:
        """Their tokens."""
        return sum(len(each.span) for each in self._portions) + self.running

    @property
    def running(self) -> int:
        """Tokens of the one that runs."""
        return 0 if self._running is None else len(self._running)

    @property
    def here(self) -> int:
        """Those of them whose inputs are here."""
        return self.behind - sum(len(each.span) for each in self._portions if not each.checked)

    @property
    def waiting(self) -> bool:
        """Whether inputs are on their way."""
        return any(each.array is None for each in self._portions)

    def request_span(self, span: range, start: int) -> None:
        self._portions.append(Portion(span, start))

    def awaits(self, lo: int, hi: int) -> bool:
        found = self._find(lo, hi)
        return found is not None and found.array is None

    def arrived(self, lo: int, hi: int, array: Array) -> bool:
        """Inputs of tokens [lo, hi) that are awaited have come; false if they are not as many as they should be."""
        found = self._find(lo, hi)
        if found is None or array.shape[:1] != (hi - lo,):
            return False
        found.array = array
        return True

    def checked(self, lo: int, hi: int) -> None:
        """They are what was sent."""
        found = self._find(lo, hi)
        if found is not None and found.array is not None:
            found.checked = True
            self.nbytes += size_of(found.array)

    def mark_lost(self, lo: int, hi: int, reason: str) -> range | None:
        """They have not come, or are not what was sent: the span, which is nobody's now."""
        found = self._find(lo, hi)
        if found is None:
            return None
        self._portions.remove(found)
        self._failures -= 1
        self.reason = reason
        return found.span

    def cut(self, reason: str) -> list[range]:
        """The source is gone: spans whose inputs have not come, which are nobody's now."""
        gone = [each for each in self._portions if each.array is None]
        self._portions = [each for each in self._portions if each.array is not None]
        self._failures, self.reason = 0, reason
        return [each.span for each in gone]

    def give_up(self) -> list[range]:
        """Spans that wait for what will never be there; they are nobody's now."""
        waiting, self._portions = [each.span for each in self._portions], []
        return waiting

    def next_span(self, reached: int) -> FetchedSpan | None:
        """What is to run now that all before `reached` is here; None while something runs, or its inputs are not
        here.
        """
        found = next((each for each in self._portions if each.span.start == reached and each.checked), None)
        if self._running is not None or found is None or found.array is None:
            return None
        self._portions.remove(found)
        self._running = found.span
        return FetchedSpan(found.span, found.start, found.array)

    def finish_span(self) -> None:
        self._running = None

    def _find(self, lo: int, hi: int) -> Portion | None:
        return next((each for each in self._portions if (each.start, each.span.stop) == (lo, hi)), None)
