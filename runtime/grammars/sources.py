"""Turn what a request asks for into the text of a grammar: schemas, expressions, choices, grammars.

The text is llguidance's own form, JSON. It travels with the sequence, and is all that a device needs besides the
vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from runtime.grammars.limits import (
    MAX_CHOICE_CHARACTERS,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARACTERS,
    MAX_REGEX_CHARACTERS,
    MAX_SCHEMA_CHARACTERS,
    GrammarRefused,
)
from runtime.grammars.schema_bounds import check_schema


def from_schema(schema: Any) -> str:
    """Return the grammar of the JSON texts that a schema accepts. Raises GrammarRefused."""
    return from_lark(f"start: %json {json.dumps(checked_schema(schema))}")


def checked_schema(schema: Any) -> dict[str, Any] | bool:
    """Return a schema, of which the text may have been given. Raises GrammarRefused if it is too large."""
    if isinstance(schema, str):
        _at_most(schema, MAX_SCHEMA_CHARACTERS, "the schema")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarRefused(f"the schema is no JSON: {type(error).__name__}") from None
    if not isinstance(schema, dict | bool):
        raise GrammarRefused("a schema is a JSON object")
    check_schema(schema)
    _at_most(json.dumps(schema), MAX_SCHEMA_CHARACTERS, "the schema")
    return schema


def from_regex(expression: str) -> str:
    """Return the grammar of the texts that an expression matches as a whole. Raises GrammarRefused."""
    _at_most(expression, MAX_REGEX_CHARACTERS, "the regular expression")
    from llguidance import LLMatcher

    made = json.loads(LLMatcher.grammar_from_regex(expression))
    return from_lark(made["grammars"][0]["lark_grammar"])


def from_choices(choices: Sequence[str]) -> str:
    """Return the grammar of several texts. Raises GrammarRefused."""
    if not choices or any(not choice for choice in choices):
        raise GrammarRefused("choices must be texts of at least one character")
    if len(choices) > MAX_CHOICES:
        raise GrammarRefused(f"there are {len(choices):,} choices, and may be {MAX_CHOICES:,}")
    _at_most("".join(choices), MAX_CHOICE_CHARACTERS, "the choices")
    return from_lark("start: " + " | ".join(quoted(choice) for choice in choices))


def from_grammar(text: str) -> str:
    """Return the grammar of a text in llguidance's Lark form or in GBNF. Raises GrammarRefused."""
    _at_most(text, MAX_GRAMMAR_CHARACTERS, "the grammar")
    if "%llguidance" in text:
        raise GrammarRefused("the grammar sets %llguidance, which the server sets")
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return from_lark(any_to_lark(text).replace("%llguidance {}", "", 1))
    except RecursionError:
        raise GrammarRefused("the grammar is nested too deeply") from None
    except Exception as error:  # a converter of text by clients, which may raise anything
        raise GrammarRefused(f"the grammar cannot be read: {' '.join(str(error).split())[:200]}") from None


def from_lark(text: str) -> str:
    """Return the grammar of a text in llguidance's Lark form.

    Text that the grammar forces may come in any tokens: an answer that satisfies the grammar by itself is unchanged.
    """
    return json.dumps({"grammars": [{"lark_grammar": f'%llguidance {{"no_forcing": true}}\n{text}'}]})


def quoted(text: str) -> str:
    """Return a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _at_most(text: str, characters: int, what: str) -> None:
    if len(text) > characters:
        raise GrammarRefused(f"{what} has {len(text):,} characters, and may have {characters:,}")
