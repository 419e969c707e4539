"""Remove a model from the catalogue, and rejoin blocks that were cut because of it. Bytes are freed by `zoo gc`."""

from __future__ import annotations

from surgery.partition.regroup import group_around, regroup
from zoo.store import Store


def remove(store: Store, name: str) -> str:
    """Remove one model and return its full name.

    The same transaction recuts the chains of models that shared with it or had equivalent blocks.

    Args:
        name: Its name or a unique ending of it.

    Raises:
        NotFound, AmbiguousName: No such model, or several.
        InUse: Other models have it as their base, or an alias points to it.
    """
    with store.catalog.writing() as writer:
        full = writer.resolve(name)
        group = group_around(writer, [full])
        writer.remove_model(full)
        regroup(writer, {other: chain for other, chain in group.items() if other != full})
    return full
