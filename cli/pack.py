"""`zoo pack`: store full fine-tunes in fewer bytes, or undo it."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, human_bytes, print_json

if TYPE_CHECKING:
    from zoo.packed.pack import PackReport

#: Niceness of the process with `--idle`, the lowest priority.
_NICE = 19


def pack(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Models; all full fine-tunes by default.")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Store what is packed plainly again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only measure: all the work, nothing kept.")] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Also pack, by themselves, tensors that have no base.")
    ] = False,
    level: Annotated[
        int, typer.Option(min=-7, max=19, help="zstd's level: above 1 hardly smaller, much slower to pack.")
    ] = 1,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads that pack.")] = 2,
    idle: Annotated[
        bool, typer.Option("--idle", help="Run at the lowest priority, beside a server for example.")
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store full fine-tunes as differences from their base: fewer bytes, the same tensors bit for bit. Runs beside
    everything else.
    """
    from cli.shared.progress import counting
    from zoo.api import Zoo

    if idle:
        os.nice(_NICE)
    with Zoo(store, database, create=False) as zoo, counting("packing", silent=as_json, counted=False) as progress:
        if undo:
            report = zoo.unpack(models or (), dry_run=dry_run, progress=progress)
        else:
            report = zoo.pack(
                models or (), level=level, threads=threads, alone=alone, dry_run=dry_run, progress=progress
            )
    if as_json:
        print_json({**dataclasses.asdict(report), "damaged": list(report.damaged)})
    else:
        _print(report, ("would unpack" if dry_run else "unpacked") if undo else ("would pack" if dry_run else "packed"))
    if report.damaged:
        raise typer.Exit(1)


def _print(report: PackReport, verb: str) -> None:
    share = f" ({report.bytes_after / report.bytes_before:.0%})" if report.bytes_before else ""
    print(f"{verb} {report.packed:,} objects, left {report.skipped:,} as they were")
    print(
        f"  {human_bytes(report.bytes_before)} before, {human_bytes(report.bytes_after)} after{share}, "
        f"{report.seconds:.1f} s"
    )
    for digest in report.damaged:
        print(f"  {digest} is damaged and was left alone: see `zoo verify`")
