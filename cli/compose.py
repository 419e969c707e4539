"""`zoo compose`: make a chain from slices of stored models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, print_json, say


def compose(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.yaml", help="Slices in mergekit's terms: slices, sources, model, layer_range."),
    ],
    name: Annotated[str | None, typer.Option(help="What to call the model; the file's name by default.")] = None,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compose a model from layers of several models, with stitches where widths differ. It costs no bytes."""
    from zoo.api import Zoo

    with Zoo(store, database, create=False) as zoo:
        report = zoo.compose(file, name)
        chain = zoo.model(report.model).chain
    if as_json:
        blocks = [
            {"block": block.digest, "layers": list(block.layers), "shared_with": list(block.shared_with)}
            for block in chain
        ]
        print_json(
            {
                "model": report.model,
                "chain": blocks,
                "exportable": report.exportable,
                "family": report.family,
                "reason": report.reason,
            }
        )
        return
    print(f"{report.model}: {report.family}, {report.blocks} blocks, {report.bytes_new} new bytes")
    if report.reason is not None:
        how = "it exports as a chain of its own architecture" if report.exportable else "it cannot be exported as files"
        say(f"note: no stock checkpoint exists for it ({report.reason}); {how}")
