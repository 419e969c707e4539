"""`zoo export`: write a model's files, byte for byte as they were ingested, or a folder without weights for vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, human_bytes, print_json


def export(
    name: Annotated[str, typer.Argument(help="The model's name, or a unique ending of it.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is new or empty.")],
    card: Annotated[
        bool, typer.Option("--card", help="Also write a model card: README.md, or ZOO_CARD.md beside one that came.")
    ] = False,
    engine: Annotated[
        Literal["vllm"] | None,
        typer.Option(
            "--for",
            help="vllm: no weights, but which tensors of this store they are; `vllm serve DIR` reads them there.",
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model's files, byte for byte; DIR loads with `from_pretrained`, an adapter's is a PEFT folder."""
    from zoo.api import Zoo
    from zoo.errors import InputError

    if card and engine is not None:
        raise InputError("--card is for a model's own files, not with --for")
    with Zoo(store, database, create=False) as zoo:
        report = zoo.model(name).export(folder, card, engine)
    if as_json:
        print_json({"model": report.model, "files": list(report.files), "bytes": report.bytes})
    else:
        print(f"{report.model}: {len(report.files)} files, {human_bytes(report.bytes)}, in {folder}")
