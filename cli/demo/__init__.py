"""`zoo demo`: train a family of models offline, store it, show what is shared, serve it and query it.

This module is the command; the steps are in `steps`, the output in `report`, each part in its own module.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, say
from zoo.errors import InputError


class Size(StrEnum):
    """The families that have a recipe."""

    real = "real"
    tiny = "tiny"
    small = "small"


def demo(
    size: Annotated[
        Size | None,
        typer.Option(
            help="real: fine-tunes of SmolLM2-135M-Instruct, about five minutes on two cores. tiny: a family trained "
            "from random weights, seven to eight minutes. small: a better one in about twenty.",
            show_default="real; tiny where its weights are not installed",
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--dir", help="Where models, plots and the report go.", file_okay=False)
    ] = Path("zoo_demo"),
    no_serve: Annotated[bool, typer.Option("--no-serve", help="Leave out the server and the questions.")] = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a family of models, share its blocks, remake, serve and ask it: all on this machine, without network.

    The weights of the real model are those of a Python package; see demo-model.txt.
    """
    from cli.demo.progress import Progress
    from cli.demo.recipe import RECIPES
    from cli.demo.steps import Demo, run_demo

    recipe = RECIPES[(size or _size_at_hand()).value]
    run_demo(Demo(recipe, folder, store, database, serve=not no_serve), Progress(), as_json=as_json)


def _size_at_hand() -> Size:
    """Return `real` if its weights are installed; else say so and return `tiny`."""
    from cli.demo.chat.base_model import find_base

    try:
        find_base()
    except InputError as error:
        say(f"note: {error}; going on with --size tiny")
        return Size.tiny
    return Size.real
