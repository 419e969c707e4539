"""Garbage collection: remove objects and blobs that no model references.

It holds the store's lock exclusively, recomputes what is referenced, and removes nothing if the store is inconsistent.
Ingests and readers hold the lock in shared mode, so an object that an ingest found in the store, or has just put, is
still there when its model is committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo.errors import DamagedObject, StoreError
from zoo.objects.publish import ObjectShelf, discard
from zoo.upkeep.leftovers import sweep

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
    """Digests that must stay.

    Fields:
        tensors: Tensors that models reference.
        packed: Packed files of these tensors.
        bases: Bases of these packed files, referenced by a model or not.
        blobs: Blobs that models reference.
    """

    tensors: frozenset[str]
    packed: frozenset[str]
    bases: frozenset[str]
    blobs: frozenset[str]

    @property
    def objects(self) -> frozenset[str]:
        return self.tensors | self.bases


def collect(store: Store, dry_run: bool = False, timeout: float = WAIT_SECONDS) -> Collected:
    """Remove unreferenced objects and blobs, temporary files, and state of abandoned runs (`zoo.upkeep.leftovers`).

    Args:
        dry_run: Count only.
        timeout: Seconds to wait for the store's lock.

    Raises:
        StoreBusy: Ingests or readers held the lock all the time.
        StoreError: The catalogue cannot be read, or references something that is missing. Nothing has been removed
            then.
    """
    with store.collecting(timeout):
        live = _live(store)
        _refuse_if_missing(store, live)
        removed = 0
        nbytes = 0
        # Packed before plain, so that an interruption leaves no packed object without its base.
        packed = (store.objects.packed.shelf, live.packed)
        for shelf, kept in (packed, (store.objects.shelf, live.objects), (store.blobs.shelf, live.blobs)):
            for digest in [digest for digest in shelf.digests() if digest not in kept]:
                nbytes += shelf.size(digest) if dry_run else shelf.remove(digest)
                removed += 1
            nbytes += _remove_temporaries(shelf, dry_run)
        nbytes += sweep(store.root / "work", dry_run)
        return Collected(removed, nbytes)


def withdraw(store: Store, objects: Iterable[str], blobs: Iterable[str]) -> None:
    """Remove those of these objects and blobs that no model references.

    Raises StoreBusy at once if the lock is held.
    """
    with store.collecting(timeout=0):
        live = _live(store)
        for digest in set(objects) - live.objects:  # bases of packed objects are live
            store.objects.shelf.remove(digest)
        for digest in set(blobs) - live.blobs:
            store.blobs.shelf.remove(digest)


def _live(store: Store) -> _Live:
    with store.catalog.reading() as reader:
        tensors, blobs = frozenset(reader.live_tensors()), frozenset(reader.live_blobs())
    packed = frozenset(
        digest for digest in store.objects.packed.shelf.digests() if digest in tensors and not _is_spare(store, digest)
    )
    return _Live(tensors, packed, _bases(store, packed), blobs)


def _is_spare(store: Store, packed: str) -> bool:
    """Return whether a packed object also has a sound plain file, which makes the packed file redundant."""
    return store.objects.shelf.size(packed) > 0 and store.objects.check(packed)


def _bases(store: Store, packed: Iterable[str]) -> frozenset[str]:
    try:
        bases = [store.objects.packed.table(digest).base for digest in packed]
    except DamagedObject as error:
        raise StoreError(f"nothing was removed: {error}; run `zoo verify`") from error
    return frozenset(base for base in bases if base is not None)


def _refuse_if_missing(store: Store, live: _Live) -> None:
    """Raise StoreError if a referenced object is missing.

    Such a catalogue may belong to another store or be outdated, so it is no basis for removing anything.
    """
    missing = sorted(live.tensors - set(store.objects.digests())) + sorted(live.blobs - set(store.blobs.digests()))
    missing += sorted(live.bases - set(store.objects.shelf.digests()))
    if missing:
        raise StoreError(
            f"nothing was removed: {len(missing)} objects that models need are missing, first {missing[0]}; run `zoo "
            "verify`"
        )


def _remove_temporaries(shelf: ObjectShelf, dry_run: bool) -> int:
    """Remove all staged files. None is being written, since every writer holds the lock in shared mode."""
    return sum(path.lstat().st_size if dry_run else discard(path) for path in list(shelf.temporaries()))
