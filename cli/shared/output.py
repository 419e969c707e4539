"""What every verb prints and how: one JSON document or text for people on standard output, all else on standard error.

Knows nothing of what is reported.
"""

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
#: Every verb takes `--store`, so that scripts may give it to all alike.
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
#: Columns of a table that no terminal bounds: a file or a pipe.
_UNBOUND_WIDTH = 200


def say_error(line: str) -> None:
    """One line on standard error, whatever the message holds."""
    print("zoo: " + " ".join(line.split()), file=sys.stderr)


def say(line: str) -> None:
    """Progress and notes, on standard error."""
    print(line, file=sys.stderr, flush=True)


def print_json(document: Any) -> None:
    """The document of a `--json` run."""
    json.dump(document, sys.stdout, indent=2, sort_keys=False, allow_nan=False)
    sys.stdout.write("\n")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A plain table that fits the terminal, or a wide one where there is none; numbers are aligned to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, heading in enumerate(headings):
        numeric = bool(rows) and all(isinstance(row[column], int | float) for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    plain_console(width=None if sys.stdout.isatty() else _UNBOUND_WIDTH).print(table)


def plain_console(file: TextIO | None = None, width: int | None = None) -> Console:
    """One that shows text as it is: names may hold brackets and colons, which rich would take for its own."""
    from rich.console import Console

    return Console(file=file or sys.stdout, width=width, markup=False, emoji=False, highlight=False)


def human_bytes(count: int) -> str:
    """1234567 -> '1.2 MB' (decimal units)."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
