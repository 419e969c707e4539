"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table's lines; bars and line breaks in cells are escaped."""
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    lines += [f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return lines


def code(text: str) -> str:
    """Return text as code; nothing for nothing."""
    return f"`{text}`" if text else ""
