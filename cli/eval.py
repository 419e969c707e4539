"""`zoo eval`: measure a stored model's accuracy on tasks of lm-eval, or on built-in tasks that need no network."""

from __future__ import annotations

from typing import Annotated, Any

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
from cli.shared.values import (
    AllowCodeOption,
    BatchSizeOption,
    DeviceOption,
    DtypeOption,
    FewshotOption,
    LimitOption,
    NoStoreOption,
    SeedOption,
    names_of,
)
from zoo.errors import InputError


def eval(
    name: Annotated[str, typer.Argument(help="The model, or a unique ending of its name.")],
    also: Annotated[
        list[str] | None, typer.Argument(metavar="[TASK]...", help="Tasks after the first.", hidden=True)
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            help="library_ppl, library_cloze, library_recall, a YAML file, a folder, or a name lm-eval knows.",
        ),
    ] = None,
    limit: LimitOption = None,
    batch_size: BatchSizeOption = "8",
    num_fewshot: FewshotOption = None,
    seed: SeedOption = 1234,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    allow_code: AllowCodeOption = False,
    no_store: NoStoreOption = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a model's accuracy; with none named, on the zoo's own tasks. A run that was stopped goes on where it
    was.
    """
    from cli.serving.models import check_device
    from cli.shared.progress import hush
    from surgery.evaluation.builtin import builtins
    from surgery.evaluation.harness import EvalOptions
    from surgery.evaluation.record import evaluate_stored
    from surgery.text.library import EVERYTHING
    from zoo.api import Zoo

    specs = names_of((*(tasks or ()), *(also or ())))
    options = EvalOptions(limit_of(limit), batch_size_of(batch_size), num_fewshot, seed)
    check_device(device)
    hush(bars=True)
    with Zoo(store, database, create=False) as zoo:
        chosen = specs or [task.name for task in builtins().values() if task.subject == EVERYTHING]
        document = evaluate_stored(zoo, name, chosen, options, device, dtype, keep=not no_store, allow_code=allow_code)
    if as_json:
        print_json(document)
    else:
        _print(document)


def limit_of(limit: float | None) -> float | None:
    """Return the number or share of questions. Raises InputError."""
    if limit is None or 0 < limit < 1 or (limit >= 1 and limit == int(limit)):
        return limit
    raise InputError("--limit takes a whole number of questions, or a share below 1")


def batch_size_of(given: str) -> int | str:
    """Return the number of sequences at once, or "auto". Raises InputError."""
    if given == "auto" or given.startswith("auto:"):
        return given
    if given.isdigit() and int(given) > 0:
        return int(given)
    raise InputError("--batch-size takes a whole number above 0, or auto")


def _print(document: dict[str, Any]) -> None:
    rows = []
    for task, measured in document["results"]["results"].items():
        for key, value in measured.items():
            metric, _, choice = key.partition(",")
            if not choice or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = measured.get(f"{metric}_stderr,{choice}")
            rows.append((task, metric, f"{value:.4f}", f"± {error:.4f}" if isinstance(error, float) else ""))
    print_table(("task", "metric", "value", ""), rows)
    say(f"{document['model']}: {document['seconds']:.1f} s")
