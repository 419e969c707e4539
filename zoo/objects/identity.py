"""Ties a store's folder to its catalogue, so that a collection never applies one catalogue to another store's objects.

The folder holds a random identity in `store.id`, and the catalogue has the same identity as a setting. A new catalogue
may be tied to a folder only while the folder holds no objects.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

from zoo.catalog import Catalog
from zoo.errors import StoreError
from zoo.objects import locks

_FILE = "store.id"
_SETTING = "store"
_LOCK_SECONDS = 60.0


def is_store(root: Path) -> bool:
    """Return whether the folder holds a store."""
    return (root / _FILE).is_file()


def folder_identity(root: Path) -> str:
    """Return the folder's identity, creating it if absent. Raises StoreError if it cannot be read or written."""
    try:
        if not is_store(root):
            root.mkdir(parents=True, exist_ok=True)
            with locks.exclusive(root / "lock", _LOCK_SECONDS):
                _make(root)
        text = (root / _FILE).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"there can be no store in {root}: {error}") from error
    if len(text) != 32 or not text.isalnum():
        raise StoreError(f"{root / _FILE} is damaged: it does not hold a store's name")
    return text


def tie(catalog: Catalog, identity: str, root: Path, is_empty: Callable[[], bool]) -> None:
    """Check that the catalogue belongs to the folder; tie a new catalogue to it.

    Args:
        is_empty: Returns whether the folder holds no objects; called for a new catalogue only, since it reads folders.

    Raises:
        StoreError: The catalogue belongs to another folder, or is new while the folder holds objects.
    """
    with catalog.reading() as reader:
        if reader.setting(_SETTING) == identity:
            return
    with catalog.writing() as writer:
        known = writer.setting(_SETTING)  # another process may have set it meanwhile
        if known is None and not is_empty():
            raise StoreError(
                f"{root} holds objects, but its catalogue is new and empty: give the database it was made with"
            )
        if known is None:
            writer.set_setting(_SETTING, identity)
        elif known != identity:
            raise StoreError(
                f"the catalogue belongs to another store than {root}: every store needs a database of its own"
            )


def _make(root: Path) -> None:
    """Write the identity atomically; the caller holds the lock."""
    if is_store(root):
        return
    temporary = root / (_FILE + ".new")
    with temporary.open("w", encoding="ascii") as file:
        file.write(uuid.uuid4().hex + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(root / _FILE)
