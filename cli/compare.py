"""`zoo compare`: score the similarity of two models, part by part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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

if TYPE_CHECKING:
    from surgery.scoring.comparison import Comparison, Score

Granularity = Literal["layer", "component", "group"]


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A model, or a unique ending of its name.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one with the same tokenizer.")],
    probe: HeldOutOption = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a heatmap of all parts against all parts to this PNG.", dir_okay=False)
    ] = None,
    granularity: Annotated[
        Granularity | None,
        typer.Option(help="What is held against what.", show_default="layer, or group where the depths differ"),
    ] = None,
    groups: Annotated[int | None, typer.Option(help="Number of groups of layers.", min=1)] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the probe.", min=1)] = 4096,
    window: WindowOption = 128,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Score every part against every part, not only the pairs.")
    ] = False,
    control: Annotated[bool, typer.Option(help="Score a random-init twin of B as well.")] = True,
    seed: Annotated[int, typer.Option(help="Of the twin's weights and of where the probe is drawn.")] = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score which parts of two models could stand in for each other: the same text through both, read by their own
    heads.
    """
    from cli.shared.progress import counting, hush
    from surgery.scoring.compare import CompareSettings
    from zoo.api import Zoo

    hush()
    settings = CompareSettings(
        probe, tokens, window, granularity, groups, matrix or plot is not None, control, seed, device, dtype
    )
    with Zoo(store, database, create=False) as zoo, counting("comparing", silent=as_json) as progress:
        found = zoo.compare(a, b, settings, progress)
    if plot is not None:
        from cli.plots.comparison import draw

        draw(found, plot)
        say(f"wrote {plot}")
    if as_json:
        print_json(found.document())
    else:
        _print(found)


def _print(found: Comparison) -> None:
    unit = "part" if found.granularity == "component" else "layer"
    headings = (f"{unit} A", f"{unit} B", "similarity", "control", "KL(A,B)", "KL(B,A)", "same token", "hidden")
    print(
        f"A {found.a}\nB {found.b}\n{found.probe.tokens:,} tokens of {found.probe.source}, probe "
        f"{found.probe.digest[:12]}\n"
    )
    print_table(headings, [_row(pair, unit == "part") for pair in found.pairs])
    print(
        f"\nmean {found.mean:.4f}"
        + ("" if found.control is None else f", control {found.control:.4f}")
        + f"   ({found.seconds:.1f} s)"
    )


def _row(pair: Score, by_component: bool) -> tuple[str, ...]:
    spans = [unit.components if by_component else unit.layers for unit in (pair.a, pair.b)]
    named = [str(span.lo) if span.hi == span.lo + 1 else f"{span.lo}-{span.hi - 1}" for span in spans]
    metrics = [pair.metrics.get(name) for name in ("kl_ab", "kl_ba", "agreement", "hidden")]
    return (*named, *("" if value is None else f"{value:.4f}" for value in (pair.similarity, pair.control, *metrics)))
