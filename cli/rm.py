"""`zoo rm`: remove a model from the catalogue."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, print_json


def rm(
    name: Annotated[str, typer.Argument(help="The model's name, or a unique ending of it.")],
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a model from the catalogue; `zoo gc` then frees what only it used."""
    from zoo.api import Zoo

    with Zoo(store, database, create=False) as zoo:
        removed = zoo.remove(name)
    if as_json:
        print_json({"removed": removed})
    else:
        print(f"removed {removed}; `zoo gc` frees what only it used")
