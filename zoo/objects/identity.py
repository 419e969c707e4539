"""Ties a store's folder to its catalogue, so that a collection never judges the objects of one by the models of
another.

The folder holds a random name in `store.id`, and the catalogue the same name as a setting. A new catalogue may be tied
to a folder only while that holds no objects. This file knows nothing of what either contains.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from zoo.catalog import Catalog
from zoo.errors import StoreError
from zoo.objects import locks

_FILE = "store.id"
_SETTING = "store"
_LOCK_SECONDS = 60.0


def is_store(root: Path) -> bool:
    """Whether a store was made in this folder."""
    return (root / _FILE).is_file()


def folder_identity(root: Path) -> str:
    """The folder's own name; a folder without one gets one. Raises StoreError when it cannot be read or written."""
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


def tie(catalog: Catalog, identity: str, root: Path, is_empty: bool) -> None:
    """Check that the catalogue belongs to the folder; a new catalogue is tied to it.

    Raises:
        StoreError: the catalogue belongs to another folder, or is new while the folder holds objects.
    """
    with catalog.reading() as reader:
        if reader.setting(_SETTING) == identity:
            return
    with catalog.writing() as writer:
        known = writer.setting(_SETTING)  # another process may have been faster
        if known is None and not is_empty:
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
    """Under the lock: write the name whole, under a temporary name first."""
    if is_store(root):
        return
    temporary = root / (_FILE + ".new")
    with temporary.open("w", encoding="ascii") as file:
        file.write(uuid.uuid4().hex + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(root / _FILE)
