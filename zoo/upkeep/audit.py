"""Audit: re-hash every object, blob and manifest, and name the models that damage or loss hurts. It repairs and removes
nothing.

Ingests may go on meanwhile; a collection may not. This file knows nothing of how models are read.
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
    """What does not match its digest or is missing, and the models that need it: an object, a blob, or (by its
    fingerprint) a model's own manifest in the catalogue.
    """

    digest: str
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Audit:
    """`objects`: tensors and blobs looked at, missing ones too; `bytes`: of their files. `damaged` is sorted by
    digest.
    """

    objects: int
    bytes: int
    damaged: tuple[Damaged, ...]


class _Checked(Protocol):
    """What objects and blobs have in common here."""

    def digests(self) -> Iterator[str]: ...

    def size(self, digest: str) -> int: ...

    def check(self, digest: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Item:
    digest: str
    checked: _Checked


def audit(store: Store, progress: Callable[[int, int], None] | None = None) -> Audit:
    """Check everything on disk and everything that models name.

    Args:
        progress: called with (files checked, files in all) after each file.

    Raises:
        StoreBusy: a collection held the lock all the time.
        StoreError: the catalogue cannot be read.
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
    """A damaged object hurts its own models and those of every object that is packed against it."""
    upon = store.objects.packed.dependents() if bad else {}
    users = reader.users_of({*bad, *chain.from_iterable(upon.get(digest, ()) for digest in bad)})
    return [Damaged(digest, _merged(users, [digest, *upon.get(digest, ())])) for digest in bad]


def _merged(users: Mapping[str, tuple[str, ...]], digests: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name for digest in digests for name in users.get(digest, ())}))


def _changed_manifests(reader: Reader) -> list[Damaged]:
    """Models that the catalogue no longer tells as they were put."""
    stored = reader.fingerprints()
    return [Damaged(digest, (name,)) for name, digest in stored.items() if reader.model(name).fingerprint != digest]


def _items(store: Store) -> Iterator[_Item]:
    """Whatever is on disk or named. Read from the catalogue first: what is named later was durable before."""
    with store.catalog.reading() as reader:
        tensors, blobs = reader.live_tensors(), reader.live_blobs()
    return chain(_of(store.objects, tensors), _of(store.blobs, blobs))


def _of(checked: _Checked, live: set[str]) -> Iterator[_Item]:
    return (_Item(digest, checked) for digest in sorted(live.union(checked.digests())))
