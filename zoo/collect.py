"""Garbage collection: remove what no model names. It holds the store alone, recomputes what lives, and stops at the first doubt.

Ingests and readers hold the same lock together, so an object that an ingest found in the store, or has just put, is still there when
its model is committed. This file knows nothing of how models are read or written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo.errors import StoreError
from zoo.publish import Shelf, discard

if TYPE_CHECKING:
    from zoo.store import Store

#: Seconds to wait for ingests and readers to end.
WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Collected:
    """What was removed, or would be. `bytes_removed` counts the bytes of whole files on disk."""

    objects_removed: int
    bytes_removed: int


@dataclass(frozen=True, slots=True)
class _Live:
    """What models name. Of tensors and of blobs."""

    objects: frozenset[str]
    blobs: frozenset[str]


def collect(store: Store, dry_run: bool = False, timeout: float = WAIT_SECONDS) -> Collected:
    """Remove objects and blobs that no model names, and what killed ingests left behind.

    Args:
        dry_run: count only.
        timeout: seconds to wait for the store's lock.

    Raises:
        StoreBusy: ingests or readers held the lock all the time.
        StoreError: the catalogue cannot be read, or names something that is missing. Nothing has been removed then.
    """
    with store.collecting(timeout):
        live = _live(store)
        _refuse_if_missing(store, live)
        removed = 0
        nbytes = 0
        for shelf, kept in ((store.objects.shelf, live.objects), (store.blobs.shelf, live.blobs)):
            for digest in [digest for digest in shelf.digests() if digest not in kept]:
                nbytes += shelf.size(digest) if dry_run else shelf.remove(digest)
                removed += 1
            nbytes += _remove_temporaries(shelf, dry_run)
        return Collected(removed, nbytes)


def withdraw(store: Store, objects: Iterable[str], blobs: Iterable[str]) -> None:
    """Remove those of these objects and blobs that no model names. Raises StoreBusy at once when anyone else holds the lock."""
    with store.collecting(timeout=0):
        live = _live(store)
        for digest in set(objects) - live.objects:
            store.objects.shelf.remove(digest)
        for digest in set(blobs) - live.blobs:
            store.blobs.shelf.remove(digest)


def _live(store: Store) -> _Live:
    with store.catalog.reading() as reader:
        return _Live(frozenset(reader.live_tensors()), frozenset(reader.live_blobs()))


def _refuse_if_missing(store: Store, live: _Live) -> None:
    """A catalogue that names what is not there may not be this store's, or not the newest: no ground to remove anything on."""
    missing = sorted(live.objects - set(store.objects.digests())) + sorted(live.blobs - set(store.blobs.digests()))
    if missing:
        raise StoreError(f"nothing was removed: the catalogue names {len(missing)} missing objects, first {missing[0]}; run `zoo verify`")


def _remove_temporaries(shelf: Shelf, dry_run: bool) -> int:
    """Nobody can be writing these: whoever stages a file holds the lock together with others."""
    return sum(path.lstat().st_size if dry_run else discard(path) for path in list(shelf.temporaries()))
