"""The version of this program.

Agents of another version than the scheduler's are refused: they might compute other tokens.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Return the version of this package; `source` if it runs without being installed."""
    try:
        return version("blockzoo")
    except PackageNotFoundError:
        return "source"
