"""Read fields that the configs of several kinds of adapter share, with type checks.

Follows peft 0.21. This module reads values of an `adapter_config.json` alone: no keys, shapes or base.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zoo.errors import MalformedCheckpoint

#: Expressions are untrusted input and are matched by backtracking, so the cost of matching a table of them against one
#: module's name is bounded.
_PATTERN_LENGTH = 200
_PATTERNS_LIMIT = 5_000
_PATHS_LIMIT = 500_000
#: A plain expression: a dot in it can only match one character, as in a module's name.
_PLAIN = re.compile(r"[\w.\-]+")
_NUMBER_LIMIT = 1e30


@dataclass(frozen=True, slots=True)
class SavedModules:
    """PEFT's `modules_to_save`.

    Fields:
        keeps_ties: Tied modules count as one in the list (`ensure_weight_tying`).
    """

    names: tuple[str, ...] = ()
    keeps_ties: bool = False

    def covers(self, module: str) -> bool:
        """Return whether the module, or one that contains it, is replaced as a whole."""
        return any(module.endswith(name) or f"{name}." in module for name in self.names)


def saved_modules(config: Mapping[str, Any]) -> SavedModules:
    """Return the config's `modules_to_save`. Raises MalformedCheckpoint for names that peft would read as patterns."""
    saved = names(config.get("modules_to_save"), "modules_to_save")
    for name in saved:
        if not _PLAIN.fullmatch(name):
            raise MalformedCheckpoint(
                f"adapter_config.json: modules_to_save holds {name[:60]!r}, which is no module's name"
            )
    return SavedModules(saved, bool(config.get("ensure_weight_tying")))


def names_module(wanted: tuple[str, ...] | None, module: str) -> bool:
    """Return whether a list of module names contains the module, by name or ending.

    `wanted` is None for an expression, which is taken to match any module.
    """
    return wanted is None or any(module == name or module.endswith("." + name) for name in wanted)


def patterns(config: Mapping[str, Any], field: str) -> tuple[tuple[re.Pattern[str], Any], ...]:
    """Return a table of (expression for the end of a module's path, value); the first match applies.

    Raises MalformedCheckpoint.
    """
    value = config.get(field) or {}
    if not isinstance(value, dict) or len(value) > _PATTERNS_LIMIT:
        raise MalformedCheckpoint(f"adapter_config.json: {field} is not a usable table")
    _check_paths(value, field)
    return tuple((re.compile(rf"(.*\.)?({key})$"), each) for key, each in value.items())


def check_pattern(pattern: str, field: str) -> None:
    """Raise MalformedCheckpoint for an invalid expression, or one that could take exponential time to match."""
    _check_paths((pattern,), field)


def _check_paths(expressions: Iterable[str], field: str) -> None:
    left = _PATHS_LIMIT
    for expression in expressions:
        left -= _paths(expression)
        if left < 0:
            raise MalformedCheckpoint(
                f"adapter_config.json: {field} holds the expression {expression[:60]!r}, which is too complex to run "
                "safely"
            )
        try:
            re.compile(expression)
        except (re.error, OverflowError, RecursionError):
            raise MalformedCheckpoint(
                f"adapter_config.json: {field} holds {expression[:60]!r}, which is no regular expression"
            ) from None


def _paths(expression: str) -> int:
    """Return an upper bound on the ways to match an expression to a name of some 40 characters.

    This is the cost of a failing match. Repeated groups, flags and assertions have no such bound and exceed the limit.
    """
    if _PLAIN.fullmatch(expression):
        return 1
    if len(expression) > _PATTERN_LENGTH or re.search(r"\)\s*[*+?{]|\(\?(?!:)", expression):
        return _PATHS_LIMIT + 1
    bare = expression.replace("(?:", "(")
    choices, groups = bare.count("|"), bare.count("(") + 1
    repeats = len(re.findall(r"[*+?{]+", bare))
    branches = [math.ceil(choices / groups + 1)] * min(groups, choices)
    return math.comb(40 + repeats, repeats) * math.prod(branches)


def targets(value: Any) -> tuple[str, ...] | None:
    """Return `target_modules` as a sorted list of names, or None for an expression or the architecture's defaults.

    Raises MalformedCheckpoint.
    """
    if value is None or isinstance(value, str):
        return None
    return names(value, "target_modules")


def names(value: Any, field: str) -> tuple[str, ...]:
    """Return a list of names, sorted. Raises MalformedCheckpoint."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise MalformedCheckpoint(f"adapter_config.json: {field} is not a list of names")
    return tuple(sorted(set(value)))


def number(value: Any, field: str) -> float:
    """Return a finite number as float. Raises MalformedCheckpoint."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds {str(value)[:40]!r}, which is no number")
    if not abs(value) < _NUMBER_LIMIT:
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds a number that is too large")
    return float(value)


def count(value: Any, field: str, what: str = "usable number") -> int:
    """Return a positive integer below 2^20; `what` names it in the error. Raises MalformedCheckpoint."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 20:
        raise MalformedCheckpoint(f"adapter_config.json: {field} holds {str(value)[:40]!r}, which is no {what}")
    return value
