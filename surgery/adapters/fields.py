"""Fields that the configs of several kinds of adapter have in common, read with their types checked.

Follows peft 0.21. It sees values of an `adapter_config.json` alone: no keys, no shapes, no base.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zoo.errors import MalformedCheckpoint

#: Patterns are regular expressions from strangers: they are kept too small to run away.
_PATTERN_LENGTH = 200
_PATTERN_REPEATS = 4
_PATTERNS_LIMIT = 20_000
_NUMBER_LIMIT = 1e30


@dataclass(frozen=True, slots=True)
class Saved:
    """PEFT's `modules_to_save`, and whether tied modules count as one there (`ensure_weight_tying`)."""

    names: tuple[str, ...] = ()
    keeps_ties: bool = False

    def covers(self, module: str) -> bool:
        """Whether the module, or one that it lies in, is replaced as a whole."""
        return any(module.endswith(name) or f"{name}." in module for name in self.names)


def saved_modules(config: Mapping[str, Any]) -> Saved:
    """`modules_to_save` of a config."""
    return Saved(names(config.get("modules_to_save"), "modules_to_save"), bool(config.get("ensure_weight_tying")))


def names_module(wanted: tuple[str, ...] | None, module: str) -> bool:
    """Whether a list of module names has the module, as far as plain names tell; an expression (None) names anything."""
    return wanted is None or any(module == name or module.endswith("." + name) for name in wanted)


def patterns(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """A table from expressions to values. Raises MalformedCheckpoint."""
    value = config.get(field) or {}
    if not isinstance(value, dict) or len(value) > _PATTERNS_LIMIT:
        raise MalformedCheckpoint(f"adapter_config.json: {field} is not a usable table")
    for key in value:
        check_pattern(key, field)
    return value


def check_pattern(pattern: str, field: str) -> None:
    """Refuse expressions whose matching could take exponential time, and those that are none."""
    repeats = len(re.findall(r"[*+?{]", pattern))
    if len(pattern) > _PATTERN_LENGTH or repeats > _PATTERN_REPEATS or re.search(r"\)\s*[*+?{]", pattern):
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds the expression {pattern[:60]!r}, which is too complex to run safely")
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except re.error:
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds {pattern[:60]!r}, which is no regular expression") from None


def targets(value: Any) -> tuple[str, ...] | None:
    """`target_modules`: a list of names, sorted, or None for an expression or the architecture's defaults. Raises MalformedCheckpoint."""
    if value is None or isinstance(value, str):
        return None
    return names(value, "target_modules")


def names(value: Any, field: str) -> tuple[str, ...]:
    """A list of names, sorted. Raises MalformedCheckpoint."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise MalformedCheckpoint(f"adapter_config.json: {field} is not a list of names")
    return tuple(sorted(set(value)))


def number(value: Any, field: str) -> float:
    """A finite number. Raises MalformedCheckpoint."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds {str(value)[:40]!r}, which is no number")
    if not abs(value) < _NUMBER_LIMIT:
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds a number that is too large")
    return float(value)


def count(value: Any, field: str, what: str = "usable number") -> int:
    """A positive whole number below 2^20; `what` names it in the error. Raises MalformedCheckpoint."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 20:
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds {str(value)[:40]!r}, which is no {what}")
    return value
