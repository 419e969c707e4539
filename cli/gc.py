"""`zoo gc`: remove objects that no model uses."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, human_bytes, print_json


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove stored bytes that no model uses. Waits for ingests and readers to end."""
    from zoo.api import Zoo

    with Zoo(store, database, create=False) as zoo:
        collected = zoo.gc(dry_run)
    if as_json:
        print_json({"objects_removed": collected.objects_removed, "bytes_removed": collected.bytes_removed})
    else:
        verb = "would remove" if dry_run else "removed"
        print(f"{verb} {collected.objects_removed:,} objects, {human_bytes(collected.bytes_removed)}")
