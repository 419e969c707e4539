"""`zoo promote`: let an alias point to a model that passes its conditions, compared with what is live."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from cli.eval import batch_size_of, limit_of
from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, print_json, print_table
from cli.shared.values import (
    AllowCodeOption,
    BatchSizeOption,
    DeviceOption,
    DtypeOption,
    FewshotOption,
    LimitOption,
    SeedOption,
)

if TYPE_CHECKING:
    from surgery.evaluation.promotion import Promotion


def promote(
    run: Annotated[str, typer.Argument(help="The model; or a run, for its newest checkpoint run@step-n.")],
    to: Annotated[str, typer.Option("--to", help="The alias.", show_default=False)],
    conditions: Annotated[
        list[str] | None,
        typer.Option(
            "--if",
            help="TASK>=X or TASK>=live, <= where less is better, TASK:METRIC for another metric; may be repeated.",
        ),
    ] = None,
    limit: LimitOption = None,
    batch_size: BatchSizeOption = "8",
    num_fewshot: FewshotOption = None,
    seed: SeedOption = 1234,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    allow_code: AllowCodeOption = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let an alias point to a model if it passes every condition, measured by lm-eval beside what is live; else exit
    with 1, and nothing is changed.
    """
    from cli.serving.models import check_device
    from cli.shared.progress import hush
    from surgery.evaluation.harness import EvalOptions
    from surgery.evaluation.promotion import promote
    from zoo.api import Zoo

    options = EvalOptions(limit_of(limit), batch_size_of(batch_size), num_fewshot, seed)
    check_device(device)
    hush(bars=True)
    with Zoo(store, database, create=False) as zoo:
        done = promote(zoo, run, to, conditions or (), options, device, dtype, allow_code)
    if as_json:
        print_json(asdict(done))
    else:
        _print(done)
    if not done.promoted:
        raise typer.Exit(1)


def _print(done: Promotion) -> None:
    if done.figures:
        rows = [
            (each.condition, each.metric, f"{each.candidate:.4f}", _figure(each.live), "yes" if each.met else "no")
            for each in done.figures
        ]
        print_table(("condition", "metric", done.candidate, f"live: {done.live or 'nothing'}", "met"), rows)
    if not done.promoted:
        stays = "still points to nothing" if done.live is None else f"still points to {done.live}"
        print(f"refused: {done.alias} {stays}")
    elif done.figures:
        print(f"{done.alias} -> {done.candidate}")
    else:
        print(f"{done.alias} points to {done.candidate} already")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
