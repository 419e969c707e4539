"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from runtime.engine.sampling.choice import TokenChoice
from runtime.kv.transfers import Fetch, put
from runtime.types import Logprob


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """The chosen token's log-probability and the most likely alternatives, best first."""

    chosen: float
    top: tuple[Logprob, ...]


class LogitScores:
    """Log-probabilities of chosen tokens and of the best ones, being copied to the host.

    Args:
        logits: [rows, vocabulary] in float32.
        chosen: [rows].
        wanted: the number of best ones for each row.
    """

    def __init__(self, logits: Tensor, chosen: Tensor, wanted: Sequence[int], choice: TokenChoice) -> None:
        own, values, ids = choice.scored(logits, chosen, min(max(wanted), logits.shape[1]))
        self._wanted = wanted
        self._own = Fetch(own)
        self._best = (Fetch(values), Fetch(ids)) if max(wanted) else None

    @functools.cached_property
    def rows(self) -> list[RowLogprobs]:
        """The log-probabilities of all rows; the first access waits for them."""
        own = self._own.values()
        if self._best is None:
            return [RowLogprobs(value, ()) for value in own]
        values, ids = (best.values() for best in self._best)
        rows = []
        for row, count in enumerate(self._wanted):
            pairs = zip(ids[row][:count], values[row][:count], strict=True)
            # Minus infinity is no alternative: a grammar forbids it.
            likely = tuple(Logprob(token, value) for token, value in pairs if value != -math.inf)
            rows.append(RowLogprobs(own[row], likely))
        return rows

    def row(self, at: int) -> RowLogprobs:
        return self.rows[at]


def prompt_scores(logits: Tensor, targets: Sequence[int], count: int, choice: TokenChoice) -> LogitScores:
    """Return the log-probabilities of the tokens that followed each position.

    logits: [positions, vocabulary]; targets: one id per position.
    """
    return LogitScores(logits.float(), put(targets, logits.device), [count] * len(targets), choice)
