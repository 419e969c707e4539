"""Fetch the hidden states from which a migration recomputes its front, where it cannot start from token ids.

    request_span --PageRequest--> source --PageData--> arrived --VerifyActivations--> checked
    next_span: a row recomputes the span … finish_span

A span is assigned to the front from the moment it is requested (`policy.migration.two_ended`), so hidden states travel
only for what is recomputed. The next spans travel while a row runs. A span that does not arrive or does not verify is
dropped (`mark_lost`); after `_FAILURES` of those, and when the source is gone, no more are requested. Nothing is sent
here.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.agent.migration.activation_cache import size_of
from runtime.chains import Array

#: Number of lost spans after which the front gives up.
_FAILURES = 4


@dataclass(slots=True)
class Portion:
    """A requested span. Its tokens before `start` are here already.

    Fields:
        array: The hidden states; None until they arrive.
        checked: Whether they have been verified.
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
    """The requested spans of one migration.

    Attributes: `before`: the component that the hidden states entered; `nbytes`: bytes that arrived and verified;
    `reason`: why the latest lost span was lost.
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
        """Whether no more spans can be fetched."""
        return self._failures <= 0

    @property
    def claimed_count(self) -> int:
        """Number of spans assigned to the front, the running one included."""
        return len(self._portions) + (self._running is not None)

    @property
    def behind(self) -> int:
        """Tokens of the spans assigned to the front."""
        return sum(len(each.span) for each in self._portions) + self.running

    @property
    def running(self) -> int:
        """Tokens of the span that runs."""
        return 0 if self._running is None else len(self._running)

    @property
    def here(self) -> int:
        """Tokens of assigned spans for which the hidden states are here and verified."""
        return self.behind - sum(len(each.span) for each in self._portions if not each.checked)

    @property
    def waiting(self) -> bool:
        """Whether requested hidden states have not arrived yet."""
        return any(each.array is None for each in self._portions)

    def request_span(self, span: range, start: int) -> None:
        self._portions.append(Portion(span, start))

    def awaits(self, lo: int, hi: int) -> bool:
        found = self._find(lo, hi)
        return found is not None and found.array is None

    def arrived(self, lo: int, hi: int, array: Array) -> bool:
        """Record the hidden states of tokens [lo, hi).

        Returns False if they were not requested or have another length.
        """
        found = self._find(lo, hi)
        if found is None or array.shape[:1] != (hi - lo,):
            return False
        found.array = array
        return True

    def checked(self, lo: int, hi: int) -> None:
        """Record that the hidden states of tokens [lo, hi) verified."""
        found = self._find(lo, hi)
        if found is not None and found.array is not None:
            found.checked = True
            self.nbytes += size_of(found.array)

    def mark_lost(self, lo: int, hi: int, reason: str) -> range | None:
        """Drop a span that did not arrive or did not verify, and return it for reassignment; None if it is unknown."""
        found = self._find(lo, hi)
        if found is None:
            return None
        self._portions.remove(found)
        self._failures -= 1
        self.reason = reason
        return found.span

    def cut(self, reason: str) -> list[range]:
        """Stop fetching, and return the spans that have not arrived, for reassignment."""
        gone = [each for each in self._portions if each.array is None]
        self._portions = [each for each in self._portions if each.array is not None]
        self._failures, self.reason = 0, reason
        return [each.span for each in gone]

    def give_up(self) -> list[range]:
        """Drop all spans that wait to run and return them for reassignment."""
        waiting, self._portions = [each.span for each in self._portions], []
        return waiting

    def next_span(self, reached: int) -> FetchedSpan | None:
        """Return the span to run next; None while a span runs or the next one is not verified.

        `reached`: all tokens before it are here.
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
