"""Where one answer is in its grammar: a function of the grammar and the tokens so far.

The state is rebuilt by running the tokens through the grammar, so that it survives whatever makes a sequence start
again: preemption, a move to another device, speculated tokens that do not stand, another server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.grammars.compiled import CompiledGrammars
from runtime.grammars.limits import GrammarRefused

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarState:
    """The state of one sequence.

    Args:
        grammar: Its text.
        size: Number of the model's logits.
        ends: Ids that end an answer.
    """

    def __init__(self, grammars: CompiledGrammars, grammar: str, size: int, ends: Sequence[int]) -> None:
        self._grammars, self._grammar, self._size, self._ends = grammars, grammar, size, ends
        self._matcher: LLMatcher | None = None
        self._consumed: list[int] = []

    def blocked(self, output: Sequence[int]) -> NDArray[np.bool_]:
        """Return which tokens may not follow the output: [logits].

        Where the grammar's limits are reached, or the output is not one of the grammar, only the ends may follow: the
        frontend then reports that the answer is not complete (`runtime.frontend.choice`).
        """
        try:
            matcher = self._follow(output)
            allowed = None if matcher.is_error() else matcher.compute_bitmask()
            if allowed is not None and not matcher.is_error() and any(allowed):
                bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")[: self._size]
                blocked = np.ones(self._size, np.bool_)
                np.equal(bits, 0, out=blocked[: len(bits)])
                return blocked
        except GrammarRefused:
            pass
        blocked = np.ones(self._size, np.bool_)
        blocked[list(self._ends)] = False
        return blocked

    def _follow(self, output: Sequence[int]) -> LLMatcher:
        """Return the matcher behind the output. Raises GrammarRefused."""
        known = len(self._consumed)
        if self._matcher is None or self._consumed != list(output[:known]):
            self._matcher, self._consumed, known = self._grammars.matcher(self._grammar), [], 0
        new = list(output[known:])
        if new:
            self._matcher.consume_tokens(new)
            self._consumed += new
        return self._matcher
