"""Removing a model: the catalogue forgets it, and blocks that were cut for its sake are joined again. Bytes wait for
`zoo gc`.
"""

from __future__ import annotations

from surgery.partition.regroup import group_around, regroup
from zoo.store import Store


def remove(store: Store, name: str) -> str:
    """Remove one model, in one transaction with the new chains of those that shared with it or had blocks equivalent to
    its.

    Args:
        name: its name or a unique ending of it.

    Returns:
        Its full name.

    Raises:
        NotFound, AmbiguousName: no such model, or several.
        InUse: other models name it as their base.
    """
    with store.catalog.writing() as writer:
        full = writer.resolve(name)
        group = group_around(writer, [full])
        writer.remove_model(full)
        regroup(writer, {other: chain for other, chain in group.items() if other != full})
    return full
