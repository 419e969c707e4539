"""Lists in pages, as OpenAI's routes ask for them and give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from runtime.frontend.errors import RequestError


def page_query(request: Request, usual: int, most: int) -> tuple[int, str | None]:
    """Return how many items a page has, and the id behind which it begins; `usual`, `most`: items of a page.

    Raises RequestError for a `limit` that is no number from 1 to `most`.
    """
    given, after = request.query_params.get("limit"), request.query_params.get("after")
    if given is None:
        return usual, after
    if not (given.isascii() and given.isdigit() and len(given) < 9 and 1 <= int(given) <= most):
        raise RequestError(f"limit is a number from 1 to {most}", param="limit")
    return int(given), after


def page_document(items: Sequence[Mapping[str, Any]], more: bool) -> dict[str, Any]:
    """Return a page of a list. `more`: whether further items follow."""
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": list(items), **ends, "has_more": more}
