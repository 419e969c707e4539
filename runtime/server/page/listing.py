"""The list of models as a view shows it: what is asked for, filtered, sorted and cut into pages. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.frontend.errors import RequestError
from zoo.catalog import ModelSummary

_NUMBERS = re.compile(r"([0-9]+)")
#: Models on one page, and characters of a text that names must hold.
ROWS, MOST_CHARACTERS = 500, 200


def by_name(name: str) -> list[Any]:
    """Return a key that sorts names with their numbers as numbers: `run@step-9` before `run@step-10`."""
    return [int(part) if at % 2 else part for at, part in enumerate(_NUMBERS.split(name))]


_KEYS: Mapping[str, Callable[[ModelSummary], Any]] = {
    "name": lambda model: by_name(model.name),
    "kind": lambda model: (model.kind, by_name(model.name)),
    "base": lambda model: (by_name(model.base or ""), by_name(model.name)),
    "family": lambda model: (model.family, by_name(model.name)),
    "params": lambda model: -model.params,
    "blocks": lambda model: -model.blocks,
    "bytes": lambda model: -model.bytes,
    "own": lambda model: -model.bytes_own,
    "newest": lambda model: -model.created.timestamp(),
}


@dataclass(frozen=True, slots=True)
class ListQuery:
    """What a view of the list is asked for. `text`: names must hold it, in any case; `page` counts from 1."""

    text: str = ""
    sort: str = "name"
    page: int = 1


@dataclass(frozen=True, slots=True)
class ListedModels:
    """One page of the list: its models, how many there are on all pages, and the number of pages."""

    models: Sequence[ModelSummary]
    found: int
    pages: int


def wanted(query: Mapping[str, str]) -> ListQuery:
    """Return what a query asks for. Raises RequestError 400."""
    text, sort, page = query.get("q", ""), query.get("sort", "name"), query.get("page", "1")
    if len(text) > MOST_CHARACTERS:
        raise RequestError(f"q may have {MOST_CHARACTERS} characters at most.", param="q")
    if sort not in _KEYS:
        raise RequestError(f"sort must be one of {', '.join(_KEYS)}.", param="sort")
    if not (page.isascii() and page.isdigit() and 0 < len(page) < 7 and int(page) > 0):
        raise RequestError("page must be a whole number from 1.", param="page")
    return ListQuery(text, sort, int(page))


def listed(models: Sequence[ModelSummary], asked: ListQuery) -> ListedModels:
    """Return the page that is asked for; one behind the last is empty."""
    text = asked.text.casefold()
    found = sorted((model for model in models if text in model.name.casefold()), key=_KEYS[asked.sort])
    begin = (asked.page - 1) * ROWS
    return ListedModels(found[begin : begin + ROWS], len(found), max(1, -(-len(found) // ROWS)))
