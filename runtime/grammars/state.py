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

#: A set of tokens: token t in bit t % 32 of word t // 32, at most [ceil(logits / 32)]. Tokens behind its end are not
#: in it.
TokenMask = NDArray[np.uint32]


class GrammarState:
    """The state of one sequence.

    Args:
        grammar: Its text.
        size: Number of the model's logits.
        ends: Ids that end an answer.
    """

    def __init__(self, grammars: CompiledGrammars, grammar: str, size: int, ends: Sequence[int]) -> None:
        self._grammars, self._grammar, self._words, self._ends = grammars, grammar, -(-size // 32), ends
        self._matcher: LLMatcher | None = None
        self._output: list[int] = []

    def allowed(self, kept: int, new: Sequence[int] = (), slow: bool = False) -> TokenMask:
        """Return which tokens may follow the output: its first `kept` tokens until now, and new ones.

        `slow`: Python's lock is not held, at the cost of some microseconds (`CompiledGrammars.follow_slowly`).

        Where the grammar's limits are reached, or the output is not one of the grammar, only the ends may follow: the
        frontend then reports that the answer is not complete (`runtime.frontend.choice`).
        """
        try:
            matcher = self._follow(kept, new, slow)
            bits = None if matcher.is_error() else matcher.compute_bitmask()
            if bits is not None and not matcher.is_error():
                words = np.frombuffer(bits, "<u4").astype(np.uint32, copy=False)
                if words.any():
                    return words[: self._words]  # the vocabulary may have more tokens than there are logits
        except GrammarRefused:
            pass
        words = np.zeros(self._words, np.uint32)
        for token in self._ends:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def _follow(self, kept: int, new: Sequence[int], slow: bool) -> LLMatcher:
        """Return the matcher behind the output. Raises GrammarRefused."""
        if kept > len(self._output):
            raise ValueError(f"token {kept} follows {len(self._output)} tokens")
        whole = self._matcher is None or kept < len(self._output)
        del self._output[kept:]
        self._output += new
        if self._matcher is None or whole:
            self._matcher, new = None, self._output
            self._matcher = self._grammars.matcher(self._grammar)
        if slow:
            self._grammars.follow_slowly(self._matcher, new)
        elif new:
            self._matcher.consume_tokens(list(new))
        return self._matcher
