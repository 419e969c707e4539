"""`zoo demo`: train a small family of models offline, store it, show what is shared, serve it and query it.

This module is the command; the steps are in `steps`, the output in `report`, each part in its own module.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption


class Size(StrEnum):
    """The families that have a recipe."""

    tiny = "tiny"
    small = "small"


def demo(
    size: Annotated[
        Size, typer.Option(help="tiny: seven to eight minutes on two cores. small: a better family in about twenty.")
    ] = Size.tiny,
    folder: Annotated[
        Path, typer.Option("--dir", help="Where models, plots and the report go.", file_okay=False)
    ] = Path("zoo_demo"),
    no_serve: Annotated[bool, typer.Option("--no-serve", help="Leave out the server and the questions.")] = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a small family, share its blocks, serve it and ask it: all steps on this machine, without network."""
    from cli.demo.progress import Progress
    from cli.demo.recipe import RECIPES
    from cli.demo.steps import Demo, run_demo

    run_demo(Demo(RECIPES[size.value], folder, store, database, serve=not no_serve), Progress(), as_json=as_json)
