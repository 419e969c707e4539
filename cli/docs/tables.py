"""Format Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table's lines. Bars in cells are escaped, line breaks become spaces."""
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    lines += [f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return lines


def code(text: str) -> str:
    """Return text as Markdown code, the empty string unchanged."""
    return f"`{text}`" if text else ""
