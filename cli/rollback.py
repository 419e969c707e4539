"""`zoo rollback`: let an alias point to what it pointed to before."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.shared.documents import targets_text
from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, print_json


def rollback(
    name: Annotated[str, typer.Argument(metavar="ALIAS", help="The alias.")],
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let an alias point to what it pointed to before its latest change; servers follow at once."""
    from zoo.api import Zoo

    with Zoo(store, database, create=False) as zoo:
        alias = zoo.roll_back(name)
    if as_json:
        print_json(alias.document())
    else:
        print(f"{alias.name} -> {targets_text(alias.now)}")
