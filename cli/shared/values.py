"""Options that several verbs share, and the parsing of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from cli.shared.sizes import size_of
from zoo.errors import InputError

DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="the models' own")]
HeldOutOption = Annotated[
    str | None,
    typer.Option(
        help="Text or JSONL file, or datasets:PATH[:CONFIG][:SPLIT].",
        show_default="held-out files of the standard library",
    ),
]
WindowOption = Annotated[int, typer.Option(help="Tokens that are read at a time.", min=2)]
NoStoreOption = Annotated[bool, typer.Option("--no-store", help="Do not keep the result in the store.")]
AllowCodeOption = Annotated[bool, typer.Option("--allow-code", help="Run the Python that task files name.")]
LimitOption = Annotated[float | None, typer.Option(help="Questions per task; below 1, their share.")]
BatchSizeOption = Annotated[str, typer.Option(help="Sequences at once; auto finds out.")]
FewshotOption = Annotated[
    int | None, typer.Option(help="Solved examples before a question.", show_default="the task's own")
]
SeedOption = Annotated[int, typer.Option(help="Of everything that is drawn.")]


def names_of(given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of any number of comma-separated arguments."""
    return tuple(name for each in given or () for name in each.split(",") if name)


def numbers_of(option: str, text: str) -> tuple[int, ...]:
    """Parse comma-separated whole numbers; an empty text has none. Raises InputError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() and len(part) < 8 for part in parts):
        raise InputError(f"{option} takes whole numbers with commas, such as 1,4,16: not {text!r}")
    return tuple(int(part) for part in parts)


def budget_of(option: str, text: str) -> float:
    """Parse `25%` as 0.25, or a size such as `12MB` as bytes. Raises InputError."""
    if not text.endswith("%"):
        return float(size_of(text))
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise InputError(f"{option} takes a share between 0% and 100%, or a size such as 12MB: not {text!r}")
    return share
