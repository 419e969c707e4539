"""Stop strings in text that arrives in pieces: nothing of a match is ever given out, wherever the pieces are cut.

The stop string that is complete first ends the text (of those complete at the same character, the longest), so the
result does not depend on how the text was cut into pieces. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text to `push` until `stopped`; then everything before the match has been given out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str, counts: bool = True) -> str:
        """Text that cannot be part of a match any more. `counts` False: a match that lies wholly in text pushed so far
        is none.
        """
        if not self._stops:
            return text
        buffer, fresh = self._held + text, len(self._held)
        at = self._match(buffer, fresh) if counts else None
        if at is not None:
            self.stopped, self._held = True, ""
            return buffer[:at]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """What was held back: the text has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _match(self, buffer: str, fresh: int) -> int | None:
        """Where the first complete match begins. It ends after `fresh`: what came before was looked at already."""
        found = []
        for stop in self._stops:
            begin = buffer.find(stop, max(0, fresh - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin))
        return min(found)[1] if found else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
