"""What became of one request: when it was due, sent, begun and done, token by token. Seconds of one clock; pure.

    due ------> sent ------> first token ------> … ------> last token
     |<----------- TTFT ---------->|<- (n - 1) x TPOT -->|
     |<------------------- end to end ------------------>|

Latencies count from when the request was due, not from when the client got round to sending it: a client that falls
behind a server that stalls would otherwise leave the stall out (coordinated omission).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """What a client heard: `stamps[i]` is when the i-th lot of tokens came, `lots[i]` how many they were.

    `tokens`: of the answer, as the server counts them where it does. `error`: a kind, such as `http 404` or
    `broken stream`; `detail`: one line.
    """

    stamps: tuple[float, ...] = ()
    lots: tuple[int, ...] = ()
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's fate. `ended`: the last token, or when the error was known."""

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
        """None where no token came."""
        return self.heard.stamps[0] - self.due if self.heard.stamps else None

    @property
    def tpot(self) -> float | None:
        """Time per token after the first lot; None where nothing came after it."""
        after = self.tokens - self.heard.lots[0] if self.heard.lots else 0
        if after < 1 or len(self.heard.stamps) < 2:
            return None
        return (self.heard.stamps[-1] - self.heard.stamps[0]) / after

    @property
    def e2e(self) -> float:
        return self.ended - self.due

    @property
    def gaps(self) -> Sequence[float]:
        """Between lots."""
        return [b - a for a, b in itertools.pairwise(self.heard.stamps)]
