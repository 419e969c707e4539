"""`zoo export`: write a model's files, byte for byte as they were ingested."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, human_bytes, print_json


def export(
    name: Annotated[str, typer.Argument(help="The model's name, or a unique ending of it.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is new or empty.")],
    card: Annotated[
        bool, typer.Option("--card", help="Also write a model card: README.md, or ZOO_CARD.md beside one that came.")
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model's files, byte for byte; DIR loads with `from_pretrained`, an adapter's is a PEFT folder."""
    from zoo.api import Zoo

    with Zoo(store, database, create=False) as zoo:
        report = zoo.model(name).export(folder, card)
    if as_json:
        print_json({"model": report.model, "files": list(report.files), "bytes": report.bytes})
    else:
        print(f"{report.model}: {len(report.files)} files, {human_bytes(report.bytes)}, in {folder}")
