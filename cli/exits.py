"""`zoo exits`: measure early exits of a model, and store those that requests may choose."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.shared.output import (
    DEFAULT_STORE,
    DatabaseOption,
    JsonOption,
    StoreOption,
    print_json,
    print_table,
    say,
)
from cli.shared.values import DeviceOption, DtypeOption, HeldOutOption, WindowOption


def exits(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model, or a unique ending of its name.")],
    make: Annotated[
        list[int] | None,
        typer.Option(
            help="Make the exit behind so many layers, MODEL@exit-N, for `zoo serve --early-exit`; repeat for several.",
            min=1,
        ),
    ] = None,
    text: HeldOutOption = None,
    tokens: Annotated[int, typer.Option(help="Tokens to score on.", min=2)] = 8192,
    window: WindowOption = 128,
    sure: Annotated[
        float, typer.Option(help="Probability from which on a next token counts as sure.", min=0.01, max=1.0)
    ] = 0.9,
    seed: Annotated[int, typer.Option(help="Of where the text is drawn.")] = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a model behind each of its layers: its own final norm and head on what they give. Exits cost no bytes."""
    from cli.shared.progress import counting, hush
    from surgery.chains.exits import ExitOptions, make_exit, measure
    from zoo.api import Zoo

    hush()
    options = ExitOptions(text, tokens, window, sure, seed, device, dtype)
    with Zoo(store, database, create=False) as zoo:
        opened = zoo.model(model)
        made = [make_exit(zoo.store, opened, layers).model for layers in make or ()]
        with counting("reading", silent=as_json) as progress:
            found = measure(zoo.store, opened, options, progress)
    if as_json:
        print_json({**found.document(), "made": made})
        return
    rows = [
        (
            str(each.layers),
            f"{each.agreement:.1%}",
            "-" if each.perplexity is None else short_number(each.perplexity),
            f"{each.sure:.1%}",
            "-" if each.sure_agreement is None else f"{each.sure_agreement:.1%}",
        )
        for each in found.exits
    ]
    print_table(["layers", "agreement", "perplexity", f"sure ({sure:g})", "agreement of these"], rows)
    print(
        f"{found.model}: next tokens of the whole model, and perplexity, over {found.tokens:,} tokens of {found.text}"
    )
    for name in made:
        say(
            f'made {name}: `zoo serve {found.model} --early-exit`, then "early_exit": {name.rpartition("-")[2]} in a '
            "request's body"
        )


def short_number(value: float) -> str:
    """Return a perplexity with two decimals, or as 1.2e+09 from a million on, as early layers of real models have."""
    return f"{value:,.2f}" if value < 1e6 else f"{value:.1e}"
