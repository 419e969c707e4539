"""`zoo verify`: re-hash everything in the store."""

from __future__ import annotations

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, human_bytes, print_json


def verify(store: StoreOption = DEFAULT_STORE, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Read and re-hash the whole store; exit code 1 when something is damaged or missing."""
    from zoo.api import Zoo

    with Zoo(store, database, create=False) as zoo:
        audit = zoo.verify()
    if as_json:
        damaged = [{"digest": each.digest, "models": list(each.models)} for each in audit.damaged]
        print_json({"objects": audit.objects, "bytes": audit.bytes, "damaged": damaged})
    else:
        print(
            f"{audit.objects:,} objects, {human_bytes(audit.bytes)}: "
            f"{f'{len(audit.damaged)} damaged' if audit.damaged else 'all sound'}"
        )
        for each in audit.damaged:
            print(f"  {each.digest} hurts {', '.join(each.models) or 'no model'}")
        if audit.damaged:
            print("ingest the models again from their sources to repair them")
    if audit.damaged:
        raise typer.Exit(1)
