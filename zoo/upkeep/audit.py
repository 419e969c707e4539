"""Audit: re-hash every object, blob and manifest, and name the affected models. Repairs and removes nothing.

Ingests may run meanwhile, a collection may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from zoo.catalog import Reader
from zoo.store import Store


@dataclass(frozen=True, slots=True)
class Damaged:
    """An object, a blob, or a model's own manifest that is damaged or missing, and the models that need it.

    A manifest in the catalogue is identified by its fingerprint.
    """

    digest: str
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of an audit.

    Fields:
        objects: Number of tensors and blobs examined, missing ones included.
        bytes: Bytes of their files.
        damaged: Sorted by digest.
    """

    objects: int
    bytes: int
    damaged: tuple[Damaged, ...]


class _Checked(Protocol):
    """The interface that objects and blobs share here."""

    def digests(self) -> Iterator[str]: ...

    def size(self, digest: str) -> int: ...

    def check(self, digest: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Item:
    digest: str
    checked: _Checked


def audit(store: Store, progress: Callable[[int, int], None] | None = None) -> Audit:
    """Check everything on disk and everything that models reference.

    Args:
        progress: Called with (files checked, files in all) after each file.

    Raises:
        StoreBusy: A collection held the lock all the time.
        StoreError: The catalogue cannot be read.
    """
    with store.keeping():
        items = list(_items(store))
        nbytes = 0
        bad = []
        for done, item in enumerate(items, start=1):
            nbytes += item.checked.size(item.digest)
            if not item.checked.check(item.digest):
                bad.append(item.digest)
            if progress is not None:
                progress(done, len(items))
        with store.catalog.reading() as reader:
            damaged = _hurt(store, reader, bad) + _changed_manifests(reader)
        return Audit(len(items), nbytes, tuple(sorted(damaged, key=lambda found: found.digest)))


def _hurt(store: Store, reader: Reader, bad: list[str]) -> list[Damaged]:
    """Return damaged objects with the affected models: the object's own and those of every object packed against it."""
    upon = store.objects.packed.dependents() if bad else {}
    users = reader.users_of({*bad, *chain.from_iterable(upon.get(digest, ()) for digest in bad)})
    return [Damaged(digest, _merged(users, [digest, *upon.get(digest, ())])) for digest in bad]


def _merged(users: Mapping[str, tuple[str, ...]], digests: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name for digest in digests for name in users.get(digest, ())}))


def _changed_manifests(reader: Reader) -> list[Damaged]:
    """Return the models with a manifest in the catalogue that no longer matches the fingerprint it was put with."""
    stored = reader.fingerprints()
    return [Damaged(digest, (name,)) for name, digest in stored.items() if reader.model(name).fingerprint != digest]


def _items(store: Store) -> Iterator[_Item]:
    """Yield everything on disk or referenced.

    The catalogue is read first: an object that is referenced later was durable before.
    """
    with store.catalog.reading() as reader:
        tensors, blobs = reader.live_tensors(), reader.live_blobs()
    return chain(_of(store.objects, tensors), _of(store.blobs, blobs))


def _of(checked: _Checked, live: set[str]) -> Iterator[_Item]:
    return (_Item(digest, checked) for digest in sorted(live.union(checked.digests())))
