"""What a simulated scheduler knows of the lengths of answers: all, nothing, or forecasts of a given accuracy (TI-10).

    hidden lengths: requests may get up to `longest` tokens, and end by a stop token that the engine samples in time

A forecast names a bucket of `granularity` tokens: the right one with probability `accuracy`, else one beside it. Its
mass is what such forecasts are worth: `accuracy` in the named bucket, the rest in those beside it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from runtime.control.scheduler_io import LengthPredicted
from runtime.policy.lengths.forecast import LengthForecast
from runtime.types import SamplingParams, SequenceRequest
from zoo.errors import InputError

#: The token that ends an answer with a hidden length; all other tokens are 0.
STOP = 1


@dataclass(frozen=True, slots=True)
class PredictedLengths:
    """What is known of the lengths of answers.

    Fields:
        hidden: Whether the scheduler sees the limit of tokens alone, or knows when an answer will end.
        granularity: Tokens of a bucket of the forecasts that it gets; 1: they are the lengths themselves; 0: it gets
            none.
        accuracy: Share of the forecasts with the right bucket.
        predict_ms: Time from a request's arrival to its forecast.
        slows: Share by which predicting slows the steps with prompts that it runs beside (TetriInfer, Figure 17: 0.1).
        seed: Of the forecasts that are wrong.
    """

    hidden: bool = False
    granularity: int = 0
    accuracy: float = 1.0
    predict_ms: float = 0.0
    slows: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.granularity < 0 or not 0 <= self.accuracy <= 1 or not 0 <= self.predict_ms < 1e6:
            raise InputError("lengths: a granularity and a time in ms of at least 0, and an accuracy from 0 to 1")
        if not 0 <= self.slows <= 10:
            raise InputError("lengths: slows is from 0 to 10")
        if self.granularity and not self.hidden:
            raise InputError("lengths: forecasts are for hidden lengths")

    def forecast(self, seq: str, answer: int, longest: int) -> LengthForecast | None:
        """Return the forecast of an answer of so many tokens, at most `longest`; None where there are none."""
        width = self.granularity
        if not width:
            return None
        if width == 1:
            return LengthForecast((0, answer, answer + 1), (0.0, 1.0, 0.0))
        edges = tuple(range(0, longest, width))
        number = int.from_bytes(hashlib.blake2b(f"{self.seed} {seq}".encode(), digest_size=8).digest(), "big")
        named = min(answer // width, len(edges) - 1)
        if (number >> 1) / (1 << 63) >= self.accuracy:
            beside = _beside(named, len(edges))
            named = beside[number % len(beside)]
        mass, beside = [0.0] * len(edges), _beside(named, len(edges))
        mass[named] = self.accuracy if beside != [named] else 1.0
        for at in beside:
            mass[at] = max(mass[at], (1 - self.accuracy) / len(beside))
        return LengthForecast(edges, tuple(mass))


class HiddenAnswers:
    """Answers of which the scheduler does not know the lengths.

    Args:
        longest: Most tokens of a prompt and its answer.
        ends: Receives the length of each answer, for the engines.
    """

    def __init__(self, lengths: PredictedLengths, longest: int, ends: dict[str, int]) -> None:
        self._lengths, self._longest, self._ends = lengths, longest, ends

    def hide(self, request: SequenceRequest) -> tuple[SequenceRequest, tuple[int, LengthPredicted] | None]:
        """Return a request that does not tell how long its answer is, and its forecast with the ns until it is made."""
        answer = request.sampling.max_tokens
        self._ends[request.seq] = answer
        most = max(self._longest - len(request.prompt), answer)
        shown = replace(request, sampling=SamplingParams(most, ignore_eos=True, stop_token_ids=(STOP,)))
        forecast = self._lengths.forecast(request.seq, answer, self._longest)
        if forecast is None:
            return shown, None
        return shown, (round(self._lengths.predict_ms * 1e6), LengthPredicted(request.seq, forecast))


def _beside(bucket: int, count: int) -> list[int]:
    """Return the buckets beside one; itself where there are none."""
    return [at for at in (bucket - 1, bucket + 1) if 0 <= at < count] or [bucket]
