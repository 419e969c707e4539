"""Which tokens a sequence's penalties count, kept from step to step.

The repetition penalty is as in transformers and vLLM, over prompt and output; the frequency and presence penalties are
as in OpenAI's API, over the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.types import SamplingParams


@dataclass(frozen=True, slots=True)
class RowPenalties:
    """The penalties of one row of logits.

    Fields:
        row: Its index.
        ids: Different tokens that are penalised.
        counts: How often each one is in the output; 0 for those of the prompt alone.
        repetition: What positive logits are divided by, and the rest multiplied with; 1 for no such penalty.
        frequency: Subtracted for each time in the output.
        presence: Subtracted once for a token of the output.
    """

    row: int
    ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    repetition: float
    frequency: float
    presence: float


def penalises(params: SamplingParams) -> bool:
    """Return whether a sequence's penalties make its next token depend on the tokens it already has."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


class SeenTokens:
    """The different tokens of a sequence: a step counts those that are new since the step before.

    Args:
        prompt: Counted for a repetition penalty only.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params, self._prompt = params, prompt if params.repetition_penalty != 1.0 else ()
        self._start()

    def penalties(self, row: int, output: Sequence[int]) -> RowPenalties:
        """Return the penalties behind an output; the arrays are valid until the next call."""
        known = len(self._output)
        if self._output != list(output[:known]):  # tokens that were speculated do not stand
            self._start()
            known = 0
        for token in output[known:]:
            place = self._place(token)  # may make the arrays anew
            self._counts[place] += 1
        self._output += output[known:]
        used, params = len(self._places), self._params
        return RowPenalties(
            row, self._ids[:used], self._counts[:used],
            params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
        )  # fmt: skip

    def _start(self) -> None:
        self._output: list[int] = []
        self._places = {token: at for at, token in enumerate(dict.fromkeys(self._prompt))}
        self._ids = np.zeros(max(2 * len(self._places), 64), np.int64)
        self._ids[: len(self._places)] = list(self._places)
        self._counts = np.zeros_like(self._ids)

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids, self._counts = (
                np.concatenate([each, np.zeros_like(each)]) for each in (self._ids, self._counts)
            )
        self._ids[place] = token
        return place
