"""Addresses of the page's views. Pure functions."""

from __future__ import annotations

from urllib.parse import quote

LOGIN, LOGOUT, HOME, REFERENCE = "/ui/login", "/ui/logout", "/", "/docs"


def model_link(name: str) -> str:
    """Return the address of a model's page. A name may hold slashes, which stay."""
    return f"/ui/models/{quote(name, safe='/')}"


def is_page(path: str) -> bool:
    """Return whether a path is one of the page's: a browser without the key is sent to the login there."""
    return path in (HOME, REFERENCE) or path.startswith("/ui/")


def own_page(path: str) -> str:
    """Return a path to go on to, if it is one of the page's views, else the first page.

    A path from a query may be anything, also `//other.host` or a text with line ends.
    """
    fine = is_page(path) and path.isprintable() and "\\" not in path and "//" not in path
    return path if fine and path.partition("?")[0] not in (LOGIN, LOGOUT) else HOME
