"""`zoo ingest`: put a checkpoint into the zoo."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cli.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, human_bytes, print_json, say

if TYPE_CHECKING:
    from surgery.ingest import IngestReport, Progress


def ingest(
    source: Annotated[str, typer.Argument(help="A folder (Hugging Face, PEFT or Meta's layout) or a hub id.")],
    name: Annotated[str | None, typer.Option(help="What to call the model; the hub id or the folder's name by default.")] = None,
    base: Annotated[str | None, typer.Option(help="The model it was made from, where that cannot be found out.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read *.bin weights with torch's restricted loader.")] = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put a checkpoint into the zoo: only what it does not share with others takes space."""
    from zoo.api import Zoo

    with Zoo(store, database) as zoo, _progress(silent=as_json) as progress:
        report = zoo.ingest(source, name, base, revision, allow_pickle, progress)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        _print(report)


def _print(report: IngestReport) -> None:
    for note in report.notes:
        say(f"note: {note}")
    made = f"{report.kind} of {report.base}" if report.base else report.kind
    print(f"{report.model}: {made}, {report.family}, {_count(report.components, 'component')} in {_count(report.blocks, 'block')}")
    print(
        f"  {report.tensors.new:,} of {_count(report.tensors.total, 'tensor')} new, "
        f"{human_bytes(report.bytes.new)} of {human_bytes(report.bytes.total)}"
    )
    print(f"  {report.seconds:.1f} s, peak memory {human_bytes(report.peak_rss_bytes)}")


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


@contextmanager
def _progress(silent: bool) -> Iterator[Progress | None]:
    """A bar on standard error while bytes are stored; nothing when that is no terminal."""
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("storing", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("storing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
