"""Pack and unpack whole models.

This is maintenance that may run beside ingests, readers and servers, and be killed at any time. For each object, under
the store's shared lock: the packed file is written and made durable, named, the name made durable, the file decoded
again and compared; only then the plain file is removed. Unpacking does the same in reverse. So one of the two files is
whole at any moment, and readers look for both.

The shared lock is held for one object at a time, so a collection never waits long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from zoo.catalog import Reader
from zoo.errors import DamagedObject, InputError, MissingObject, StoreError
from zoo.manifest import ModelManifest
from zoo.objects.headers import object_header
from zoo.objects.publish import discard
from zoo.packed.plan import MOVED, Plan, lineage, plan
from zoo.packed.writer import Coding, PackCandidate, packed_bytes
from zoo.store import Store

#: A packed object must be smaller than the plain one by this share and by one disk block: decoding costs time.
LEAST_SAVING = 0.05
LEAST_BYTES = 4096

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PackReport:
    """Result of a run; the fields of `zoo pack --json`.

    Fields:
        packed: Objects that changed form (for `unpack`, the unpacked ones).
        skipped: Objects examined and left as they were.
        bytes_before: Bytes on disk of all of these before the run.
        bytes_after: Bytes on disk of all of these after the run.
        damaged: Objects that do not match their digest and were left alone.
    """

    packed: int
    skipped: int
    bytes_before: int
    bytes_after: int
    seconds: float
    damaged: tuple[str, ...]


class _Tally:
    """Accumulates the counts of one run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._started = time.monotonic()
        self._changed = self._left = self._before = self._after = 0
        self._damaged: list[str] = []

    def count_unchanged(self, digest: str) -> None:
        """Count an object that stays as it is."""
        size = self._store.objects.size(digest)
        self._count(size, size)

    def attempt(self, digest: str, change: Callable[[], int]) -> None:
        """Change one object; `change` returns its bytes on disk afterwards, the same as before if nothing changed."""
        try:
            with self._store.keeping():
                before = self._store.objects.size(digest)
                after = change()
        except DamagedObject as error:
            if not isinstance(error, MissingObject):  # missing: it, or its base, was removed meanwhile
                self._damaged.append(digest)
            self.count_unchanged(digest)
        else:
            self._count(before, after)

    def _count(self, before: int, after: int) -> None:
        self._changed += after != before
        self._left += after == before
        self._before += before
        self._after += after

    def report(self) -> PackReport:
        seconds = time.monotonic() - self._started
        return PackReport(self._changed, self._left, self._before, self._after, seconds, tuple(self._damaged))


def pack(
    store: Store,
    names: Collection[str] = (),
    coding: Coding | None = None,
    alone: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Store the tensors of fine-tunes as differences from their base's tensors.

    Args:
        names: Models, by name or unique ending; empty for all full fine-tunes.
        coding: The default decodes fastest and gives about the smallest files.
        alone: Also pack tensors that have no base, by themselves.
        dry_run: Do all the work, but keep nothing.
        progress: Called with (plain bytes done, in all).

    Raises:
        NotFound, AmbiguousName: No such model, or several.
        InputError: A named model has no base, and `alone` is off.
        StoreBusy: Another process packs, or a collection held the store for too long.
        StoreFull, StoreError: The store cannot be written; it is still whole.
    """
    way = coding or Coding()
    work = _measured if dry_run else _packed
    with store.packing():
        tally = _Tally(store)
        if not dry_run:
            _settle_twins(store)
        planned = _planned(store, names, alone)
        for tensor in planned.left:
            tally.count_unchanged(tensor.digest)
        total, done = sum(candidate.tensor.nbytes for candidate in planned.candidates), 0
        for candidate in planned.candidates:
            tally.attempt(candidate.tensor.digest, partial(work, store, candidate, way))
            done += candidate.tensor.nbytes
            if progress is not None:
                progress(done, total)
        return tally.report()


def unpack(
    store: Store, names: Collection[str] = (), dry_run: bool = False, progress: Progress | None = None
) -> PackReport:
    """Store packed tensors as plain objects again: those of some models, or all.

    `progress` is called with (objects done, in all); the rest is as for `pack`.
    """
    work = _plain_size if dry_run else _unpacked
    with store.packing():
        tally = _Tally(store)
        if not dry_run:
            _settle_twins(store)
        chosen = _packed_of(store, names)
        for done, digest in enumerate(chosen, start=1):
            tally.attempt(digest, partial(work, store, digest))
            if progress is not None:
                progress(done, len(chosen))
        return tally.report()


def _settle_twins(store: Store) -> None:
    """Reduce objects that are both plain and packed, which a kill or a repair leaves, to one sound file each."""
    objects = store.objects
    for digest in [digest for digest in objects.packed.shelf.digests() if objects.shelf.size(digest)]:
        with store.keeping():
            try:
                objects.packed.clear_verified(digest)
                objects.packed.verify(digest)
            except DamagedObject:
                if objects.check(digest):
                    objects.packed.shelf.remove(digest)
            else:
                objects.packed.shelf.settle([digest])
                objects.shelf.remove(digest)


def _packed_of(store: Store, names: Collection[str]) -> list[str]:
    packed = list(store.objects.packed.shelf.digests())
    if not names:
        return packed
    with store.catalog.reading() as reader:
        named = {tensor.digest for name in names for tensor in reader.model(reader.resolve(name)).tensors}
    return [digest for digest in packed if digest in named]


def _planned(store: Store, names: Collection[str], alone: bool) -> Plan:
    packed = {}
    for digest in store.objects.packed.shelf.digests():
        try:
            packed[digest] = store.objects.packed.table(digest).base
        except DamagedObject:
            packed[digest] = None  # it is packed, but its base is unknown
    with store.catalog.reading() as reader:
        models = _wanted(reader, names, alone)
        known = _with_ancestors(reader, models)
    return plan([(model, lineage(model, known)) for model in models], packed, alone)


def _wanted(reader: Reader, names: Collection[str], alone: bool) -> list[ModelManifest]:
    if not names:
        return [
            reader.model(each.name)
            for each in reader.entries()
            if alone or (each.kind in MOVED and each.base is not None)
        ]
    models = [reader.model(reader.resolve(name)) for name in names]
    for model in models:
        if not alone and (model.kind not in MOVED or model.base is None):
            raise InputError(
                f"{model.name!r} is no full fine-tune with a base in the zoo: there is nothing to pack it against"
            )
    return models


def _with_ancestors(reader: Reader, models: Sequence[ModelManifest]) -> dict[str, ModelManifest]:
    known = {model.name: model for model in models}
    waiting = [model.base for model in models]
    while waiting:
        name = waiting.pop()
        if name is not None and name not in known:
            known[name] = reader.model(name)
            waiting.append(known[name].base)
    return known


def _measured(store: Store, candidate: PackCandidate, coding: Coding) -> int:
    """Return the bytes that the object would take: the plain size if packing does not pay."""
    size = sum(map(len, packed_bytes(store.objects.shelf, candidate, coding)))
    plain = store.objects.shelf.size(candidate.tensor.digest)
    return size if _pays(size, plain) else plain


def _packed(store: Store, candidate: PackCandidate, coding: Coding) -> int:
    """Pack one object if it pays and return its bytes on disk afterwards."""
    digest, objects = candidate.tensor.digest, store.objects
    plain = objects.shelf.size(digest)
    staged = objects.packed.shelf.stage(packed_bytes(objects.shelf, candidate, coding))
    try:
        size = staged.stat().st_size
        if not _pays(size, plain):
            return plain
        objects.packed.shelf.publish(staged, digest)
    finally:
        discard(staged)
    objects.packed.shelf.settle([digest])
    objects.packed.shelf.take_published()
    _replace_plain(store, digest)
    return size


def _replace_plain(store: Store, digest: str) -> None:
    """Remove a plain object after verifying the packed file that replaces it."""
    objects = store.objects
    try:
        objects.packed.clear_verified(digest)
        objects.packed.verify(digest)
    except DamagedObject as error:
        objects.packed.shelf.remove(digest)
        raise StoreError(f"object {digest} did not come back from its packed file as it was; it stays plain") from error
    objects.shelf.remove(digest)


def _plain_size(store: Store, digest: str) -> int:
    tensor = store.objects.packed.table(digest).tensor
    return len(object_header(tensor.dtype, tensor.shape)) + tensor.nbytes


def _unpacked(store: Store, digest: str) -> int:
    """Store one object plainly and return its bytes on disk afterwards."""
    objects = store.objects
    tensor = objects.packed.table(digest).tensor
    parts = chain([object_header(tensor.dtype, tensor.shape)], objects.packed.read(digest))
    staged = objects.shelf.stage(parts)
    try:
        objects.shelf.publish(staged, digest)
    finally:
        discard(staged)
    objects.shelf.settle([digest])
    objects.shelf.take_published()
    objects.packed.shelf.remove(digest)
    return objects.shelf.size(digest)


def _pays(packed: int, plain: int) -> bool:
    return packed <= min(plain * (1 - LEAST_SAVING), plain - LEAST_BYTES)
