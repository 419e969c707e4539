"""Bounds on grammars: of their text, of the work and memory of compiling one, and of the work of each mask.

A schema, regular expression or grammar is a program by a client. Servers without such bounds were stopped by them
(CVE-2025-32381: an unbounded cache of compiled grammars; other reports: automata of expressions that explode).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

#: Characters of a schema as JSON, and of all schemas of the tools of one request.
MAX_SCHEMA_CHARACTERS = 128 * 1024
#: Values inside each other in a schema, and values in total.
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_VALUES = 16_384
MAX_REGEX_CHARACTERS = 8 * 1024
MAX_GRAMMAR_CHARACTERS = 32 * 1024
MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 64 * 1024
#: What compiling may take before the request is refused: seconds of the processor, and bytes of memory beyond what the
#: process takes without a grammar. After so many seconds by the clock, as on a busy machine, it may be tried again.
COMPILE_CPU_SECONDS = 0.3
COMPILE_SECONDS = 3.0
COMPILE_BYTES = 256 * 1024 * 1024
#: Compiled grammars that are kept, and the bytes of their texts together.
KEPT_GRAMMARS = 128
KEPT_BYTES = 8 * 1024 * 1024


class GrammarRefused(Exception):
    """Raised when a grammar is malformed, not supported, too large or accepts nothing; the message has the reason."""


def parser_limits() -> LLParserLimits:
    """Return the bounds that llguidance keeps.

    By its documentation one unit of the initial fuel takes 20 ns, one of a step's fuel 70 ns, one item 50 ns, and a
    state of the lexer 1 to 2 kB: compiling takes about 20 ms, a mask 10 ms, and a sequence 40 MB at most.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
