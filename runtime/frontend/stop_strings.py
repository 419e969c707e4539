"""Find stop strings in text that arrives in pieces, without ever returning part of a match.

The stop string that is complete first ends the text; of several complete at the same character, the longest. So the
result does not depend on how the text is cut into pieces. Nothing here depends on tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Push text until `stopped`; then everything before the match has been returned. `matched`: the stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    def push(self, text: str, counts: bool = True) -> str:
        """Return the text that can no longer be part of a match.

        With `counts` False, a match that ends within the text pushed so far is ignored.
        """
        if not self._stops:
            return text
        buffer, fresh = self._held + text, len(self._held)
        found = self._match(buffer, fresh) if counts else None
        if found is not None:
            at, self.matched = found
            self._held = ""
            return buffer[:at]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """Return the text held back. Call it when the text has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _match(self, buffer: str, fresh: int) -> tuple[int, str] | None:
        """Return where the first complete match begins, and the stop string.

        Only matches that end after `fresh` are new; earlier text was searched.
        """
        found = []
        for stop in self._stops:
            begin = buffer.find(stop, max(0, fresh - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        return min(found)[1:] if found else None


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
