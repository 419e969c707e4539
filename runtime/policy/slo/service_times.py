"""Learn how long sequences run, per token of their prompts and per token of their answers (QL-14, QL-16, QL-22).

A sequence's service is the time from its start on its devices to its end there: its context is computed first, with
chunks of other prompts and rows of other sequences in the same steps, then a token comes per step. Both parts are
learned under the load that there is, so that they hold what the paper's Θ and ε stand for.

    a model that has run in a cell      its own times there
    one that has not                    its times in cells of a mean pace, times the pace of this cell
    pace of a cell                      its times beside those elsewhere, for models that have run in both

Pure; times in ns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from runtime.policy.measured_cost import MeasuredCost

#: Assumed until there are outcomes: seconds of any context, and per token of it.
_PROMPT = (((1.0, 0.0), 5e-3), ((0.0, 1.0), 1e-3))
#: Assumed time per token of an answer, in ns.
_TOKEN = 30e6
#: Tokens after which an observed time per token has half of the weight.
_HALF = 16384.0
#: Weight of what told a cell's pace, after each later outcome.
_FADING = 0.99


@dataclass(slots=True)
class _Stay:
    """A sequence on its devices.

    Fields:
        since: Its start.
        cell: Name of the cell that it runs in; empty where there are none.
        context: Tokens that had to be computed.
        seen: Time of the first token, or of the latest sample; None before the first token.
        made: Tokens of its answer then.
    """

    since: int
    cell: str
    context: int
    seen: int | None = None
    made: int = 0


class _Cost(Protocol):
    """A time that depends on a number of tokens."""

    def at(self, tokens: float) -> float: ...
    def add(self, elapsed: float, tokens: int) -> None: ...


class _PerToken:
    """A mean time per token that follows the latest tokens."""

    def __init__(self) -> None:
        self._mean, self._weight = _TOKEN, 0.0

    def at(self, tokens: float) -> float:
        return tokens * self._mean

    def add(self, elapsed: float, tokens: int) -> None:
        if tokens > 0:
            self._weight = self._weight * 0.5 ** (tokens / _HALF) + tokens
            self._mean += (elapsed / tokens - self._mean) * tokens / self._weight


class _Context:
    """The time of a context: a fixed part, and one per token."""

    def __init__(self) -> None:
        self._cost = MeasuredCost(_PROMPT)

    def at(self, tokens: float) -> float:
        return 1e9 * self._cost.at((1.0, float(tokens)))

    def add(self, elapsed: float, tokens: int) -> None:
        self._cost.add((1.0, float(tokens)), elapsed / 1e9)


class _CellPace:
    """How many times as long work takes in a cell as elsewhere: the geometric mean of the latest outcomes."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._log = self._weight = 0.0

    def add(self, ratio: float) -> None:
        self._weight = _FADING * self._weight + 1
        self._log += (math.log(ratio) - self._log) / self._weight
        self.factor = math.exp(self._log)


class _LearnedWork:
    """Times of one kind of work, by model and cell. `pooled`: a new model is like the rest, else as assumed."""

    def __init__(self, make: Callable[[], _Cost], pooled: bool) -> None:
        self._make, self._pooled, self._all = make, pooled, make()
        self._models: dict[str, _Cost] = {}
        self._own: dict[str, dict[str, _Cost]] = {}
        self._paces: dict[str, _CellPace] = {}

    def at(self, model: str, cell: str | None, tokens: float) -> float:
        """Return the time in a cell; None: in one of a mean pace."""
        own = None if cell is None else self._own.get(model, {}).get(cell)
        if own is not None:
            return own.at(tokens)
        pace = None if cell is None else self._paces.get(cell)
        return self._models.get(model, self._all).at(tokens) * (1.0 if pace is None else pace.factor)

    def add(self, model: str, cell: str, elapsed: float, tokens: int) -> None:
        own = self._own.setdefault(model, {})
        if cell not in own:
            own[cell] = self._make()
        own[cell].add(elapsed, tokens)
        mean = self._models.setdefault(model, self._make())
        pace = self._paces.setdefault(cell, _CellPace())
        usual = mean.at(tokens)
        if len(own) > 1 and min(elapsed, usual) > 0:
            pace.add(elapsed / usual)
        for each in (mean, self._all) if self._pooled else (mean,):
            each.add(elapsed / pace.factor, tokens)


class ServiceTimes:
    """Times of contexts and of tokens, by model and cell; those of all models together where a model has none yet.

    `by_cell`: whether cells are told apart, or taken to be equally fast.
    """

    def __init__(self, by_cell: bool = True) -> None:
        self._by_cell = by_cell
        self._stays: dict[str, _Stay] = {}
        self._tokens, self._contexts = _LearnedWork(_PerToken, pooled=True), _LearnedWork(_Context, pooled=False)
        #: Number of outcomes so far: predictions stay while it does.
        self.version = 0

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def start(self, seq: str, context: int, now: int, cell: str = "") -> None:
        """Record that a sequence starts in a cell, with so many tokens to compute before its next one."""
        self._stays[seq] = _Stay(now, cell if self._by_cell else "", context)

    def first_token(self, seq: str, model: str, made: int, now: int) -> None:
        """Record the first token since the start; `made`: tokens of the answer with it."""
        stay = self._stays.get(seq)
        if stay is not None and stay.seen is None:
            self._contexts.add(model, stay.cell, now - stay.since, stay.context)
            stay.seen, stay.made = now, made
            self.version += 1

    def sample(self, seq: str, model: str, made: int, now: int) -> None:
        """Record how many tokens of its answer a running sequence has now."""
        stay = self._stays.get(seq)
        if stay is not None and stay.seen is not None and made > stay.made:
            self._tokens.add(model, stay.cell, now - stay.seen, made - stay.made)
            stay.seen, stay.made = now, made
            self.version += 1

    def end(self, seq: str, model: str, made: int, now: int) -> None:
        """Record that a sequence leaves its devices."""
        self.sample(seq, model, made, now)
        self._stays.pop(seq, None)

    # -- predictions: in a cell, or with None in one of a mean pace ----------------------------------------------------

    def since(self, seq: str, now: int) -> int:
        """Return how long a sequence has been running; 0 for one that does not run."""
        stay = self._stays.get(seq)
        return 0 if stay is None else now - stay.since

    def context(self, model: str, tokens: int, cell: str | None = None) -> int:
        """Return the time to compute so many tokens before the next one."""
        return int(self._contexts.at(model, self._cell(cell), tokens))

    def tokens(self, model: str, count: float, cell: str | None = None) -> int:
        """Return the time of so many tokens of an answer."""
        return int(self._tokens.at(model, self._cell(cell), count))

    def _cell(self, cell: str | None) -> str | None:
        return cell if self._by_cell else None
