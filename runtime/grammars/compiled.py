"""Compile grammars for one vocabulary, and keep the latest ones, bounded in number and in bytes."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from runtime.grammars.limits import KEPT_BYTES, KEPT_GRAMMARS, GrammarRefused, parser_limits

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer


class CompiledGrammars:
    """The latest grammars of one vocabulary, compiled. Safe to call from several threads."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._slowly: tuple[LLExecutor, LLMatcher] | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of the texts of the grammars that are kept."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the start of a grammar, the caller's own. Raises GrammarRefused."""
        with self._lock:
            known = self._kept.get(grammar)
            if known is not None:
                self._kept.move_to_end(grammar)
        if known is None:
            known = self._compile(grammar)
            self._remember(grammar, known)
        return known.deep_copy()

    def follow_slowly(self, matcher: LLMatcher, tokens: Iterable[int]) -> None:
        """Let a matcher follow tokens without Python's lock, which `LLMatcher.consume_tokens` holds.

        llguidance gives the lock up where two matchers follow a token at once: the second one is of no use. For one
        thread at a time.
        """
        from llguidance import LLExecutor

        if self._slowly is None:
            self._slowly = (LLExecutor(1), self._compile('start: "a"'))
        executor, idle = self._slowly
        for token in tokens:
            executor.consume_token_par([(matcher, token), (idle, token)])

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        made = LLMatcher(self._vocabulary, grammar, limits=parser_limits(), log_level=0)
        if made.is_error():
            raise GrammarRefused(told(made.get_error()))
        return made

    def _remember(self, grammar: str, made: LLMatcher) -> None:
        with self._lock:
            if grammar in self._kept:
                return
            self._kept[grammar] = made
            self._bytes += len(grammar)
            while len(self._kept) > KEPT_GRAMMARS or self._bytes > KEPT_BYTES:
                gone, _ = self._kept.popitem(last=False)
                self._bytes -= len(gone)


def told(error: str) -> str:
    """Return an error of llguidance as one short line, without the lines of the grammar that it repeats."""
    if error.startswith("panic"):  # a bound inside of llguidance, such as on the number of symbols
        return "it is too large"
    error = re.sub(r"\s+\d+ \| .*", "", error.replace("<non-verbose/>", ""), flags=re.DOTALL)
    place = re.match(r"at (\d+)\((\d+)\): ", error)
    if place is not None:  # the first line is the server's (`sources.from_lark`)
        error = f"line {int(place[1]) - 1}, column {place[2]}: {error[place.end() :]}"
    error = error.replace("line 1, column 8: failed to compile JSON schema: ", "")
    return " ".join(error.split())[:300] or "it cannot be compiled"
