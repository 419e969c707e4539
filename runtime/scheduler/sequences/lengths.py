"""How many tokens a sequence will still produce: forecast, known, or learned from earlier answers (UN-11).

    forecast   a predictor's, of this very request (TI-10)        known   its end is its limit of tokens
    learned    from the answers of its class (`policy.slo.lengths`): those that have ended, and those that run

Contract: it decides nothing. Where sequences run by deadline, what their order has learned is used, and learned once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist

from runtime.decode_config import DecodeConfig
from runtime.policy.slo.lengths import AnswerClass, AnswerLengths, class_of
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.types import FinishReason


class ExpectedLengths:
    """Expected lengths of the sequences of one scheduler.

    `learned`: lengths that another part learns; None: it learns them itself.
    """

    def __init__(self, config: DecodeConfig, learned: AnswerLengths | None = None) -> None:
        self._quantile = config.quantile
        self._deviations = NormalDist().inv_cdf(config.quantile)
        self._own = learned is None
        self._answers = AnswerLengths() if learned is None else learned

    def record_end(self, sequence: ScheduledSequence, reason: FinishReason) -> None:
        """Learn from the end of an answer."""
        if not self._own:
            return
        if reason in ("stop", "length"):
            self._answers.add(_class_of(sequence), len(sequence.output), sequence.seq)
        else:
            self._answers.drop_running(_class_of(sequence), sequence.seq)

    def sample(self, running: Iterable[ScheduledSequence]) -> None:
        """Learn from answers that run: they are longer than what they have so far."""
        if self._own:
            for sequence in running:
                self._answers.sample(_class_of(sequence), sequence.seq, len(sequence.output))

    def least(self, sequence: ScheduledSequence) -> int:
        """Return the tokens still to come if the forecast's bucket begins there (the paper's), else their mean."""
        made, limit = len(sequence.output), _limit(sequence)
        if sequence.forecast is not None:
            return max(sequence.forecast.lower(made, limit) - made, 1)
        return self._known(sequence, made, limit) or round(self._answers.rest(_class_of(sequence), made, limit).mean)

    def most(self, sequence: ScheduledSequence) -> int:
        """Return the tokens still to come that are not exceeded with the configured probability."""
        made, limit = len(sequence.output), _limit(sequence)
        if sequence.forecast is not None:
            return max(sequence.forecast.quantile(self._quantile, made, limit) - made, 1)
        if known := self._known(sequence, made, limit):
            return known
        rest = self._answers.rest(_class_of(sequence), made, limit)
        return max(min(round(rest.mean + self._deviations * math.sqrt(rest.variance)), limit - made), 1)

    def whole(self, sequence: ScheduledSequence) -> float:
        """Return the expected tokens of the whole answer."""
        made, limit = len(sequence.output), _limit(sequence)
        if sequence.forecast is not None:
            return sequence.forecast.mean(made, limit)
        rest = self._known(sequence, made, limit) or self._answers.rest(_class_of(sequence), made, limit).mean
        return made + rest

    def _known(self, sequence: ScheduledSequence, made: int, limit: int) -> int:
        """Return the tokens still to come of an answer that nothing but its limit ends; 0 where that is not known."""
        sampling = sequence.request.sampling
        return max(limit - made, 1) if sampling.ignore_eos and not sampling.stop_token_ids else 0


def _limit(sequence: ScheduledSequence) -> int:
    return sequence.place.most if sequence.path else sequence.most_on(sequence.chain.spec)


def _class_of(sequence: ScheduledSequence) -> AnswerClass:
    request = sequence.request
    return class_of(sequence.chain.model, len(request.prompt), request.sampling.max_tokens)
