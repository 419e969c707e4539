"""`zoo experiment`: measure the accuracy cost of sharing blocks, or switching between them, for two models.

These are Figures 10 and 11 of BlockLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from cli.shared.values import AllowCodeOption, DeviceOption, DtypeOption, NoStoreOption, names_of, numbers_of
from zoo.errors import InputError

if TYPE_CHECKING:
    from surgery.experiments.points import MixturePoint
    from surgery.experiments.run import Request

Kind = Literal["sharing", "switching"]


def experiment(
    kind: Annotated[Kind, typer.Argument(help="sharing: k layers in a row from A; switching: A and B by turns.")],
    a: Annotated[str, typer.Argument(help="The foundation model that gives the layers.")],
    b: Annotated[str, typer.Argument(help="The model that they are put into: a fine-tune of the same shape.")],
    text: Annotated[
        str | None, typer.Option(help="A text or JSONL file, a dataset, library:mail.", show_default="the library")
    ] = None,
    counts: Annotated[
        str | None, typer.Option(help="sharing: how many layers in a row, as 1,2,4.", show_default="powers of 2")
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="switching: behind which layers, as 4,6.", show_default="half of them")
    ] = None,
    every: Annotated[
        str | None, typer.Option(help="switching: layers between switches, as 1,2,3.", show_default="all")
    ] = None,
    surrogates: Annotated[
        list[str] | None, typer.Option(help="A chain of B with pruned layers; may be given again.")
    ] = None,
    tasks: Annotated[
        list[str] | None, typer.Option(help="A task of zoo eval for every point, too; may be given again.")
    ] = None,
    limit: Annotated[float | None, typer.Option(help="Questions per task.")] = None,
    windows: Annotated[int, typer.Option(help="Windows of held-out text.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 256,
    lines: Annotated[int, typer.Option(help="Questions which of four lines comes next; 0 asks none.")] = 96,
    batch_size: Annotated[int, typer.Option(help="Windows at once; a question takes four.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the windows that are drawn.")] = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    allow_code: AllowCodeOption = False,
    out: Annotated[Path, typer.Option(help="Folder for the document, the plot and what has been measured.")] = Path(
        "zoo_experiments"
    ),
    no_store: NoStoreOption = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure chains mixed from two models. A run that was stopped goes on where it was."""
    from cli.serving.models import check_device
    from cli.shared.progress import counting, hush
    from surgery.evaluation.harness import EvalOptions
    from surgery.experiments.questions import Question
    from surgery.experiments.run import Request, run_experiment
    from surgery.text.text import read_text
    from zoo.api import Zoo

    plan = _sharing(counts) if kind == "sharing" else _switching(start, every)
    check_device(device)
    hush()
    with Zoo(store, database, create=False) as zoo:
        request = Request(
            kind,
            zoo.model(a).name,
            zoo.model(b).name,
            plan,
            read_text(text),
            Question(windows, length, lines, batch_size, seed),
            tuple(surrogates or ()),
            names_of(tasks),
            EvalOptions(limit=limit, batch_size=batch_size),
            device,
            dtype,
            allow_code,
        )
        stem = out / _stem(request)
        with counting("measuring", silent=False) as progress:
            document = run_experiment(
                zoo, request, stem.with_name(f"{stem.name}.measured.json"), not no_store, progress
            )
    _write(document, stem)
    if as_json:
        print_json(document)
    else:
        _print(document)


def _sharing(counts: str | None) -> Callable[[int, str], list[MixturePoint]]:
    from surgery.experiments.points import sharing_points, usual_counts

    given = numbers_of("--counts", counts or "")
    return lambda layers, replaceable: sharing_points(layers, given or usual_counts(layers), replaceable)


def _switching(start: str | None, every: str | None) -> Callable[[int, str], list[MixturePoint]]:
    from surgery.experiments.points import switching_points, usual_intervals

    starts, intervals = numbers_of("--start", start or ""), numbers_of("--every", every or "")

    def plan(layers: int, replaceable: str) -> list[MixturePoint]:
        behind = starts or [layers // 2]
        return [
            point
            for each in sorted(set(behind))
            for point in switching_points(layers, [each], intervals or usual_intervals(layers, each), replaceable)
        ]

    return plan


def _stem(request: Request) -> str:
    """Return the stem of the output files' names, from the models and the text but not the settings."""
    part = "".join(c if c.isalnum() or c in "-_" else "-" for c in request.text.origin.removeprefix("library:"))
    text = "" if request.text.origin == "the built-in text" else f"-on-{part}"
    return "-".join([request.experiment, *(name.replace("/", "--") for name in (request.a, request.b))]) + text


def _write(document: dict[str, Any], stem: Path) -> None:
    """Write the document and its plot. Raises InputError if the folder cannot be written."""
    import json

    from cli.plots.experiment import plot_experiment

    try:
        stem.with_name(f"{stem.name}.json").write_text(
            json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
        plot_experiment(document, stem.with_name(f"{stem.name}.png"))
    except OSError as error:
        raise InputError(f"{stem}.png cannot be written: {error.strerror}") from None
    say(f"{stem}.json, {stem}.png")


def _print(document: dict[str, Any]) -> None:
    rows = [(f"{document[letter]} alone", "", "", *_numbers_of(document["baselines"][letter])) for letter in ("a", "b")]
    rows += [(point["line"], point["size"], point["at"], *_numbers_of(point)) for point in document["points"]]
    size, at = ("layers", "from") if document["experiment"] == "sharing" else ("behind", "every")
    print_table(("chain", size, at, "accuracy", "less b", "±", "loss", "lines"), rows)


def _numbers_of(entry: dict[str, Any]) -> tuple[str, ...]:
    accuracy, lines = entry["accuracy"], entry.get("lines")
    error = accuracy["difference_error"]
    return (
        f"{accuracy['value']:.4f}",
        f"{accuracy['difference']:+.4f}",
        "" if error is None else f"{error:.4f}",
        f"{entry['loss']['value']:.4f}",
        "" if lines is None else f"{lines['value']:.3f}",
    )
