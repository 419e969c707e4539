"""`zoo stitch`: train a linear block from the hidden states of one model to those of another."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from stitch.learning import Progress
    from stitch.points import StitchPoint

_SECONDS_BETWEEN_LINES = 10.0


def stitch(
    a: Annotated[str, typer.Option("--a", help="The model that gives the first layers.")],
    b: Annotated[str, typer.Option("--b", help="The model that gives the last layers.")],
    points: Annotated[
        str | None,
        typer.Option(
            help="Places to train at, LAYER_OF_A:LAYER_OF_B,… from 0: behind the one, before the other.",
            show_default="proportional",
        ),
    ] = None,
    unseen: Annotated[str | None, typer.Option(help="Further places, measured but never trained at.")] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Text or JSONL file, datasets:NAME, or library:PART.", show_default="the built-in text"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 600,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    batch: Annotated[int, typer.Option(help="Windows of text per step.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 128,
    places: Annotated[int, typer.Option(help="Places that each step trains at.")] = 2,
    labels: Annotated[
        float,
        typer.Option(
            help="Weight of the text's own next tokens beside likeness: above 0, likeness is given for accuracy."
        ),
    ] = 0.0,
    measured: Annotated[int, typer.Option(help="Held-out windows that the figures are taken on.")] = 32,
    seed: Annotated[int, typer.Option(help="Of batches and places.")] = 0,
    controls: Annotated[
        bool, typer.Option("--controls", help="Also train without the position, to compare with.")
    ] = False,
    precision: Annotated[str, typer.Option(help="no, or bf16 for mixed precision.")] = "no",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.", show_default="what accelerate finds")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--restart", help="Go on where a stopped run was, or forget it.")
    ] = True,
    name: Annotated[str | None, typer.Option(help="What to call the stitch.", show_default="A-to-B-stitch")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of the figures to this PNG.", dir_okay=False)
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a stitch from one model to another: one linear block for all places, everything else frozen."""
    from transformers.utils.logging import disable_progress_bar

    from stitch import StitchSettings, train_stitch
    from zoo.api import Zoo

    disable_progress_bar()  # its bar for reading weights would interrupt this command's lines
    settings = StitchSettings(
        points=_points(points, unseen), text=text, steps=steps, rate=rate, batch=batch, length=length, places=places,
        labels=labels, measured=measured, seed=seed, controls=controls, precision=_precision(precision),
    )  # fmt: skip
    with Zoo(store, database, create=False) as zoo, _progress() as progress:
        report = train_stitch(
            zoo, a, b, settings, name=name, device=_device(device), restart=not resume, progress=progress
        )
    if plot is not None:
        from stitch.plot import plot_stitch

        plot_stitch(report.document, plot)
    if report.reused:
        say(f"note: {report.name} was trained before, with these very settings")
    if as_json:
        print_json(report.document)
    else:
        _print(report.document)


def _points(given: str | None, unseen: str | None) -> tuple[StitchPoint, ...] | None:
    """Return the points to train at and those to measure only; None for the proportional ones. Raises InputError."""
    from stitch.points import parse_points
    from zoo.errors import InputError

    if given is None:
        if unseen is not None:
            raise InputError(
                "--unseen goes with --points: without them every third proportional place is kept out of training"
            )
        return None
    return (*parse_points(given), *(() if unseen is None else parse_points(unseen, seen=False)))


def _precision(name: str) -> Any:
    from zoo.errors import InputError

    if name not in ("no", "bf16"):
        raise InputError(f"precision {name[:20]!r} is not offered: no or bf16")
    return name


def _device(name: str | None) -> str:
    """Return the given device if it can be used, accelerate's choice if none is given. Raises InputError."""
    from cli.serving.models import check_device

    if name is not None:
        check_device(name)
        return name
    from accelerate import PartialState

    return str(PartialState().device)


def _print(document: Mapping[str, Any]) -> None:
    width_a, width_b = document["dims"]
    print(
        f"{document['stitch']}: {document['a']} (width {width_a}) to {document['b']} (width {width_b}), "
        f"{document['seconds']:.0f} s\n"
    )
    others = [name for name in ("start", "without_position", "unstitched") if name in document["points"][0]]
    headings = (
        "behind",
        "before",
        "trained",
        "similarity",
        *(name.replace("_", " ") for name in others),
        "accuracy",
        "perplexity",
    )
    print_table(headings, [_row(point, others) for point in document["points"]])
    for key in ("a", "b"):
        alone = document["parents"][key]
        print(f"{document[key]} alone: accuracy {alone['accuracy']:.4f}, perplexity {alone['perplexity']:.1f}")
    print(
        f"mean similarity {document['similarity_mean']:.4f}; loss {document['loss_first']:.3f}, then "
        f"{document['loss_last']:.3f}"
    )


def _row(point: dict[str, Any], others: list[str]) -> tuple[object, ...]:
    return (
        point["a_layer"],
        point["b_layer"],
        "yes" if point["seen"] else "no",
        f"{point['similarity']:.4f}",
        *(f"{point[name]:.4f}" for name in others),
        f"{point['accuracy']:.4f}",
        f"{point['perplexity']:.1f}",
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show a bar per part of the work on a terminal, a line from time to time elsewhere; both on standard error."""
    if not sys.stderr.isatty():
        yield plain_lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    remark = TextColumn("{task.fields[remark]}")
    columns = (TextColumn("{task.description:<14}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), remark)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def advance(what: str, done: int, total: int, remark: str) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total, remark="")
            bars.update(tasks[what], completed=done, remark=remark)

        yield advance


def plain_lines() -> Progress:
    """Return a progress callback that prints a line about every ten seconds, for logs."""
    last = time.monotonic()

    def advance(what: str, done: int, total: int, remark: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES and done < total:
            last = time.monotonic()
            say(f"  {what}: {done} of {total}{', ' if remark else ''}{remark}")

    return advance
