"""`zoo demo`: train a small family of models without network, put it into a zoo, show what is shared, serve it, ask it.

This file is the command; the steps are in `steps`, what they come to in `report`, each part in a file of its own.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption


class Size(StrEnum):
    """The families there are recipes for."""

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
    # Before torch is loaded: threads that wait for one another must not burn the cores they wait for. On a busy machine
    # that is the difference between minutes and half an hour; on an idle one it costs little.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from cli.demo.progress import Progress
    from cli.demo.recipe import RECIPES
    from cli.demo.steps import Demo, run_demo

    run_demo(Demo(RECIPES[size.value], folder, store, database, serve=not no_serve), Progress(), as_json=as_json)
