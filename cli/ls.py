"""`zoo ls`: list the stored models and the totals of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cli.shared.documents import model_document
from cli.shared.output import (
    DEFAULT_STORE,
    DatabaseOption,
    JsonOption,
    StoreOption,
    human_bytes,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from zoo.catalog import ModelSummary
    from zoo.store import Usage


def ls(store: StoreOption = DEFAULT_STORE, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List the models, and what they would take without sharing."""
    from zoo.api import Zoo

    with Zoo(store, database, create=False) as zoo:
        models = zoo.models()
        usage = zoo.store.usage()
    if as_json:
        print_json({"models": [model_document(model) for model in models], "store": _store(usage)})
    else:
        _print(models, usage)


def _store(usage: Usage) -> dict[str, int]:
    return {"objects": usage.objects, "bytes_stored": usage.bytes_stored, "bytes_logical": usage.bytes_logical}


def _print(models: list[ModelSummary], usage: Usage) -> None:
    if not models:
        print("the zoo is empty: `zoo ingest SOURCE` puts a model into it")
        return
    headings = ("name", "kind", "base", "family", "params", "blocks", "size", "of its own")
    print_table(headings, [_row(model) for model in models])
    saved = 1 - usage.bytes_stored / usage.bytes_logical if usage.bytes_logical else 0.0
    share = f", {saved:.0%} saved by sharing" if saved > 0 else ""
    print(
        f"\n{usage.objects:,} objects, {human_bytes(usage.bytes_stored)} stored for "
        f"{human_bytes(usage.bytes_logical)} of models{share}"
    )


def _row(model: ModelSummary) -> tuple[object, ...]:
    return (
        model.name,
        model.kind,
        model.base or "",
        model.family,
        _human_count(model.params),
        model.blocks,
        human_bytes(model.bytes),
        human_bytes(model.bytes_own),
    )


def _human_count(count: int) -> str:
    """Return a count in short form: 6738415616 -> '6.74B'."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= limit:
            return f"{count / limit:.2f}{unit}"
    return str(count)
