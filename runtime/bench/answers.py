"""The recorded times of one request and the latencies computed from them. All times in seconds of one clock; pure.

    due ------> sent ------> first token ------> … ------> last token
     |<----------- TTFT ---------->|<- (n - 1) x TPOT -->|
     |<------------------- end to end ------------------>|

Latencies count from when the request was due, not from when the client sent it. Otherwise a client that falls behind a
stalled server would leave the stall out (coordinated omission).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """What a client received for one request.

    Fields:
        stamps: When the i-th group of tokens arrived.
        lots: How many tokens the i-th group had.
        tokens: Tokens of the answer, by the server's count where it gives one.
        error: Kind of failure, such as `http 404` or `broken stream`; None for success.
        detail: One line about the failure.
    """

    stamps: tuple[float, ...] = ()
    lots: tuple[int, ...] = ()
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request, in seconds from the start of the run.

    Fields:
        ended: When the last token arrived, or when the error was detected.
    """

    number: int
    model: str
    due: float
    sent: float
    ended: float
    heard: TokenTimes

    @property
    def error(self) -> str | None:
        return self.heard.error

    @property
    def tokens(self) -> int:
        return self.heard.tokens

    @property
    def ttft(self) -> float | None:
        """Time to first token, None without a token."""
        return self.heard.stamps[0] - self.due if self.heard.stamps else None

    @property
    def tpot(self) -> float | None:
        """Time per token after the first group; None if nothing followed it."""
        after = self.tokens - self.heard.lots[0] if self.heard.lots else 0
        if after < 1 or len(self.heard.stamps) < 2:
            return None
        return (self.heard.stamps[-1] - self.heard.stamps[0]) / after

    @property
    def e2e(self) -> float:
        return self.ended - self.due

    @property
    def gaps(self) -> Sequence[float]:
        """Times between consecutive groups."""
        return [b - a for a, b in itertools.pairwise(self.heard.stamps)]
