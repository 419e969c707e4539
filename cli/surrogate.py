"""`zoo surrogate`: make a cheaper stand-in for a run of a model's layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.shared.output import (
    DEFAULT_STORE,
    DatabaseOption,
    JsonOption,
    StoreOption,
    human_bytes,
    print_json,
    say,
)

if TYPE_CHECKING:
    from surrogates import SurrogateOptions, SurrogateReport
    from surrogates.recovery.recover import Progress


def surrogate(
    model: Annotated[str, typer.Argument(help="The model to make a stand-in for.")],
    layers: Annotated[
        str, typer.Option(metavar="LO-HI", help="Layers counted from 0, both ends included: 4-6 is three layers.")
    ],
    part: Annotated[Literal["layer", "attention", "ffn"], typer.Option(help="What is pruned in them.")] = "layer",
    ratio: Annotated[float, typer.Option(help="Share of the block's parameters to remove, between 0 and 1.")] = 0.5,
    recover: Annotated[
        Literal["lora", "full", "none"],
        typer.Option(help="Train what is left: low-rank and merged, the matrices themselves, or not at all."),
    ] = "lora",
    importance: Annotated[
        Literal["taylor", "magnitude"], typer.Option(help="What decides which heads and channels stay.")
    ] = "taylor",
    refit: Annotated[
        bool, typer.Option("--refit/--no-refit", help="Fit the output layers anew in closed form before training.")
    ] = True,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
    rank: Annotated[int, typer.Option(min=1, help="Rank of --recover lora.")] = 16,
    text: Annotated[
        str | None, typer.Option(help="Text to learn from and to measure on: a file, JSONL or datasets:PATH; built in.")
    ] = None,
    windows: Annotated[int, typer.Option(min=2, help="Windows of text to learn from.")] = 256,
    length: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 128,
    other: Annotated[str | None, typer.Option("--from", help="Take another model's layers instead of pruning.")] = None,
    take: Annotated[
        str | None, typer.Option(metavar="LO-HI", help="Which of its layers; the same relative depth by default.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call it; MODEL@surrogate-LO-HI-PART by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of the text drawn and the training.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together when the block is timed.")] = 16,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Print what would be removed, as JSON, and stop.")
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a cheaper stand-in of a block: pruned and recovered, or of a smaller model; scored, timed and stored."""
    from surrogates import RecoverySettings, SurrogateOptions, make_from, make_surrogate, plan_surrogate
    from surrogates.pruning.plan import parse_layers
    from surrogates.scoring.timing import TimingSettings
    from zoo.api import Zoo
    from zoo.errors import InputError

    run = parse_layers(layers)
    if other is None and take is not None:
        raise InputError("--take names layers of another model: give it with --from")
    if other is not None and (part != "layer" or plan_only):
        raise InputError("--from puts whole layers in place: it goes with neither --part nor --plan-only")
    options = SurrogateOptions(
        part=part,
        ratio=ratio,
        importance=importance,
        refit=refit,
        recovery=RecoverySettings(how=recover, steps=steps, rank=rank, seed=seed),
        text=text,
        windows=windows,
        length=length,
        seed=seed,
        name=name,
        device=device,
        timing=TimingSettings(batch=batch),
    )
    with Zoo(store, database, create=False) as zoo:
        if plan_only:
            print_json(plan_surrogate(zoo, model, run, options).document())
            return
        if other is not None:
            report = make_from(zoo, model, run, other, None if take is None else parse_layers(take), options)
        else:
            with _progress(silent=as_json) as progress:
                report = make_surrogate(zoo, model, run, options, progress)
    print_json(document(report, options)) if as_json else _print(report)


def document(report: SurrogateReport, options: SurrogateOptions) -> dict[str, Any]:
    """Return the JSON document of a surrogate, the specified fields first."""
    agreement, speed, recovery = report.agreement, report.speed, report.recovery
    return {
        "surrogate": report.surrogate,
        "parent": report.parent,
        "removed_ratio": report.removed_ratio,
        "similarity": report.similarity,
        "speedup": report.speedup,
        "batch": speed.batch,
        "seconds": report.seconds,
        "layers": list(report.layers),
        "part": report.part,
        "ratio": options.ratio,
        "similarity_end": agreement.end,
        "skipped": {"similarity": agreement.skipped, "similarity_end": agreement.skipped_end},
        "loss": {"exact": agreement.loss_exact, "surrogate": agreement.loss},
        "speedup_spread": [speed.decode.low, speed.decode.high],
        "speedup_prefill": speed.prefill.median,
        "block_seconds": {"exact": speed.decode.exact_seconds, "surrogate": speed.decode.seconds},
        "threads": speed.threads,
        "probe": report.probe,
        "recovery": None
        if recovery is None
        else {
            "steps": recovery.steps,
            "loss_first": recovery.loss_first,
            "loss_last": recovery.loss_last,
            "stopped": recovery.stopped,
        },
        "bytes_new": report.bytes_new,
        "exportable": report.exportable,
        "reason": report.reason,
    }


def _print(report: SurrogateReport) -> None:
    agreement, decode = report.agreement, report.speed.decode
    lo, hi = report.layers
    print(
        f"{report.surrogate}: {report.part} of layers {lo}-{hi} of {report.parent}, {report.removed_ratio:.1%} of its "
        "parameters removed"
    )
    print(
        f"  similarity {agreement.block:.4f} behind the block, {agreement.end:.4f} at the end (left out: "
        f"{agreement.skipped:.4f})"
    )
    print(
        f"  {decode.median:.2f} times as fast at batch {report.speed.batch} ({decode.low:.2f} to {decode.high:.2f}; "
        f"prompts {report.speed.prefill.median:.2f}), {report.speed.threads} threads"
    )
    print(f"  {human_bytes(report.bytes_new)} new, {report.seconds:.1f} s")
    if report.recovery is not None and report.recovery.stopped is not None:
        say(f"note: {report.recovery.stopped}")
    if report.recovery is not None and not report.recovery.kept:
        say("note: training made it no better on text kept apart; what stood before was kept")
    if report.reason is not None:
        say(f"note: no stock checkpoint exists for it ({report.reason})")


@contextmanager
def _progress(silent: bool) -> Iterator[Progress | None]:
    """Show a bar on standard error while the block is trained; nothing if it is not a terminal."""
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
