"""`zoo quantize`: make models of quantised tensors, of which equal ones are derived and stored once."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.shared.output import (
    DEFAULT_STORE,
    DatabaseOption,
    JsonOption,
    StoreOption,
    human_bytes,
    print_json,
    print_table,
)
from cli.shared.values import names_of


def quantize(
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="Models, or unique endings of their names.")],
    scheme: Annotated[
        str, typer.Option(help="int8 or fp8: bits of a weight, with one scale for each output.")
    ] = "int8",
    called: Annotated[
        str | None, typer.Option("--as", help="What to call the result of one model.", show_default="MODEL-SCHEME")
    ] = None,
    exact_head: Annotated[
        bool,
        typer.Option("--exact-head", help="Leave the head as it is; decoding then reads more bytes."),
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Quantise models tensor by tensor: fine-tunes that share tensors share the quantised ones. No data is read."""
    from dataclasses import asdict

    from cli.shared.progress import counting
    from surgery.quantize.make import quantize as make
    from zoo.api import Zoo
    from zoo.errors import InputError

    wanted = names_of(models)
    if called is not None and len(wanted) > 1:
        raise InputError("--as names the result of one model, not of several")
    done = []
    with Zoo(store, database, create=False) as zoo:
        for name in wanted:
            with counting("quantizing", silent=as_json) as progress:
                done.append(make(zoo.store, name, scheme, called, not exact_head, progress))
    if as_json:
        print_json({"models": [asdict(report) for report in done]})
        return
    rows = [
        (
            each.model,
            each.base,
            str(each.tensors),
            str(each.reused),
            human_bytes(each.bytes),
            human_bytes(each.bytes_new),
        )
        for each in done
    ]
    print_table(["model", "made from", "quantized", "of these reused", "size", "new bytes"], rows)
