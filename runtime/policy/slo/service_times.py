"""Learn how long sequences run, per token of their prompts and per token of their answers (QL-14, QL-16).

A sequence's service is the time from its start on its devices to its end there: its context is computed first, with
chunks of other prompts and rows of other sequences in the same steps, then a token comes per step. Both parts are
learned under the load that there is, so that they hold what the paper's Θ and ε stand for. Pure; times in ns.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.policy.measured_cost import MeasuredCost

#: Assumed until there are outcomes: seconds of any context, and per token of it.
_PROMPT = (((1.0, 0.0), 5e-3), ((0.0, 1.0), 1e-3))
#: The cost of a model without outcomes; none is ever added to it.
_ASSUMED = MeasuredCost(_PROMPT)
#: Assumed time per token of an answer, in ns.
_TOKEN = 30e6
#: Tokens after which an observed time per token has half of the weight.
_HALF = 16384.0


@dataclass(slots=True)
class _Stay:
    """A sequence on its devices.

    Fields:
        since: Its start.
        context: Tokens that had to be computed.
        seen: Time of the first token, or of the latest sample; None before the first token.
        made: Tokens of its answer then.
    """

    since: int
    context: int
    seen: int | None = None
    made: int = 0


class _PerToken:
    """A mean time per token that follows the latest tokens."""

    def __init__(self, assumed: float) -> None:
        self._mean, self._weight = assumed, 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    @property
    def ns(self) -> float:
        return self._mean

    def add(self, elapsed: int, tokens: int) -> None:
        if tokens > 0:
            self._weight = self._weight * 0.5 ** (tokens / _HALF) + tokens
            self._mean += (elapsed / tokens - self._mean) * tokens / self._weight


class ServiceTimes:
    """Times of contexts and of tokens, by model; those of all models together where a model has none yet."""

    def __init__(self) -> None:
        self._stays: dict[str, _Stay] = {}
        self._tokens: dict[str, _PerToken] = {}
        self._all = _PerToken(_TOKEN)
        self._contexts: dict[str, MeasuredCost] = {}
        #: Number of outcomes so far: predictions stay while it does.
        self.version = 0

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def start(self, seq: str, context: int, now: int) -> None:
        """Record that a sequence starts, with so many tokens to compute before its next one."""
        self._stays[seq] = _Stay(now, context)

    def first_token(self, seq: str, model: str, made: int, now: int) -> None:
        """Record the first token since the start; `made`: tokens of the answer with it."""
        stay = self._stays.get(seq)
        if stay is not None and stay.seen is None:
            cost = self._contexts.setdefault(model, MeasuredCost(_PROMPT))
            cost.add((1.0, float(stay.context)), (now - stay.since) / 1e9)
            stay.seen, stay.made = now, made
            self.version += 1

    def sample(self, seq: str, model: str, made: int, now: int) -> None:
        """Record how many tokens of its answer a running sequence has now."""
        stay = self._stays.get(seq)
        if stay is not None and stay.seen is not None and made > stay.made:
            for mean in (self._tokens.setdefault(model, _PerToken(self._all.ns)), self._all):
                mean.add(now - stay.seen, made - stay.made)
            stay.seen, stay.made = now, made
            self.version += 1

    def end(self, seq: str, model: str, made: int, now: int) -> None:
        """Record that a sequence leaves its devices."""
        self.sample(seq, model, made, now)
        self._stays.pop(seq, None)

    # -- predictions ---------------------------------------------------------------------------------------------------

    def since(self, seq: str, now: int) -> int:
        """Return how long a sequence has been running; 0 for one that does not run."""
        stay = self._stays.get(seq)
        return 0 if stay is None else now - stay.since

    def context(self, model: str, tokens: int) -> int:
        """Return the time to compute so many tokens before the next one."""
        return int(1e9 * self._contexts.get(model, _ASSUMED).at((1.0, float(tokens))))

    def tokens(self, model: str, count: float) -> int:
        """Return the time of so many tokens of an answer."""
        mean = self._tokens.get(model)
        return int(count * (self._all if mean is None or not mean.known else mean).ns)
