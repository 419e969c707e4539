"""Check the size of a JSON schema, and refuse keywords that would be ignored or that reach around the limits."""

from __future__ import annotations

from typing import Any

from runtime.grammars.limits import MAX_SCHEMA_DEPTH, MAX_SCHEMA_VALUES, GrammarRefused

#: Keywords of which the value is data or names, where no keyword is looked for.
_DATA = frozenset({"enum", "const", "default", "examples", "required"})
#: Keywords of which the value maps names to schemas.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
#: Keywords that llguidance does not read and that would change which answers are valid.
_IGNORED = frozenset({"divisibleBy", "disallow", "extends", "$vocabulary"})


def check_schema(schema: Any) -> None:
    """Raise GrammarRefused for a schema that is too large or too deep, or has a keyword that would be ignored."""
    left = MAX_SCHEMA_VALUES
    waiting: list[tuple[Any, int, bool]] = [(schema, 0, True)]  # value, depth, whether its keys are keywords
    while waiting:
        value, depth, keywords = waiting.pop()
        left -= 1
        if left < 0:
            raise GrammarRefused(f"the schema has more than {MAX_SCHEMA_VALUES:,} values")
        if depth > MAX_SCHEMA_DEPTH:
            raise GrammarRefused(f"the schema has values more than {MAX_SCHEMA_DEPTH} deep")
        if isinstance(value, dict):
            if keywords:
                _check_keywords(value)
            for key, inner in value.items():
                data = keywords and key in _DATA
                waiting.append((inner, depth + 1, not data and not (keywords and key in _MAPS)))
        elif isinstance(value, list):
            waiting += [(inner, depth + 1, keywords) for inner in value]


def _check_keywords(schema: dict[str, Any]) -> None:
    for key, value in schema.items():
        if key == "x-guidance":
            raise GrammarRefused("the schema has the keyword x-guidance, which is not supported")
        if key in _IGNORED:
            raise GrammarRefused(f"the schema has the keyword {key}, which is not supported")
        if key in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            raise GrammarRefused(f"{key} is true or false only in draft 4; give it a number")
