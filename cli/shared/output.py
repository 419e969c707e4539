"""Printing of all verbs: one JSON document or readable text on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console

StoreOption = Annotated[
    Path,
    typer.Option(
        "--store", envvar="ZOO_STORE", help="Folder of the store.", show_default="./zoo_store", file_okay=False
    ),
]
#: Every verb accepts `--store`, so that scripts may pass it to all alike.
UnusedStoreOption = Annotated[
    Path,
    typer.Option(
        "--store", envvar="ZOO_STORE", help="Accepted as by all verbs; nothing is read from it.", show_default=False
    ),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar="ZOO_DATABASE",
        help="SQLAlchemy URL of the catalogue instead of the store's own SQLite file.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document and nothing else on standard output.")
]
DEFAULT_STORE = Path("zoo_store")
#: Columns of a table printed to a file or a pipe.
_UNBOUND_WIDTH = 200


def say_error(line: str) -> None:
    """Print an error as one line on standard error, even if the message has several."""
    print("zoo: " + " ".join(line.split()), file=sys.stderr)


def say(line: str) -> None:
    """Print progress or a note on standard error."""
    print(line, file=sys.stderr, flush=True)


def print_json(document: Any) -> None:
    """Print the document of a `--json` run."""
    json.dump(document, sys.stdout, indent=2, sort_keys=False, allow_nan=False)
    sys.stdout.write("\n")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a plain table that fits the terminal, `_UNBOUND_WIDTH` wide without one.

    Numbers are aligned to the right.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, heading in enumerate(headings):
        numeric = bool(rows) and all(isinstance(row[column], int | float) for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    plain_console(width=None if sys.stdout.isatty() else _UNBOUND_WIDTH).print(table)


def plain_console(file: TextIO | None = None, width: int | None = None) -> Console:
    """Return a console that prints text unchanged; rich would interpret brackets and colons in names."""
    from rich.console import Console

    return Console(file=file or sys.stdout, width=width, markup=False, emoji=False, highlight=False)


def human_bytes(count: int) -> str:
    """Return bytes in decimal units: 1234567 -> '1.2 MB'."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
