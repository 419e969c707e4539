"""`zoo delta`: store a full fine-tune as its base plus low-rank deltas, beside the exact model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from cli.shared.values import DeviceOption, budget_of

if TYPE_CHECKING:
    from surgery.deltas.make import DeltaReport


def delta(
    model: Annotated[str, typer.Argument(help="A full fine-tune in the zoo.")],
    rank: Annotated[
        int | None, typer.Option(help="The mean rank; by default the smallest that reaches the target.")
    ] = None,
    target: Annotated[
        float, typer.Option(help="Similarity to the exact fine-tune at the head, on held-out text.")
    ] = 0.98,
    most: Annotated[
        str | None,
        typer.Option(
            "--bytes", help="Instead: what is nearest in so many bytes, as 12MB or 25% (of the exact one's own)."
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="What it was made from, where the zoo does not know: all its tensors moved.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Text to weigh and score on: a file, JSONL, a dataset; the built-in text by default."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call the variant; MODEL@delta-rRANK by default.")] = None,
    embeddings: Annotated[
        Literal["exact", "lowrank"], typer.Option(help="Token table and head: whole, or of low rank too.")
    ] = "exact",
    norms: Annotated[
        Literal["exact", "fold"],
        typer.Option(help="Norms: whole, or taken over by the layers behind them, which shares more."),
    ] = "exact",
    device: DeviceOption = "cpu",
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a full fine-tune as base + low-rank deltas, as a variant beside the exact one that serves in its base's
    batch.

    A run that was stopped goes on where it was.
    """
    from cli.serving.models import check_device
    from cli.shared.progress import counting, hush
    from zoo.api import Zoo

    hush()
    budget = None if most is None else budget_of("--bytes", most)
    check_device(device)
    with Zoo(store, database, create=False) as zoo, counting("taking apart", silent=as_json) as progress:
        report = zoo.delta(
            model,
            rank,
            target,
            base=base,
            text=text,
            variant=name,
            embeddings=embeddings,
            norms=norms,
            device=device,
            budget=budget,
            progress=progress,
        )
    if as_json:
        print_json(document(report))
    else:
        _print(report)


def document(report: DeltaReport) -> dict[str, Any]:
    """Return the document of `zoo delta --json`."""
    fields = dataclasses.asdict(report)
    score = fields.pop("score")
    del score["similarity"]
    return {**fields, **score}


def _print(report: DeltaReport) -> None:
    rows = [
        (
            point.rank,
            human_bytes(point.bytes),
            *(f"{value:.4f}" for value in (point.score.similarity, point.score.top1, point.score.accuracy)),
        )
        for point in report.curve
    ]
    print_table(("rank", "bytes", "similarity", "same token", "accuracy"), rows)
    share = report.bytes / report.bytes_exact
    print(
        f"{report.variant}: {human_bytes(report.bytes)} instead of {human_bytes(report.bytes_exact)} ({share:.0%}) "
        f"beside {report.base}"
    )
    print(
        f"  similarity {report.similarity:.4f} over {report.tokens:,} held-out tokens; the base's own is "
        f"{report.base_similarity:.4f}"
    )
