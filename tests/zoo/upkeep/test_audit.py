"""Audit: every byte of a store is checked, and damage is reported with the models it affects."""

from __future__ import annotations

from tests.zoo.factory import files_under, flip_byte, ingest, some_bytes
from zoo.store import Store
from zoo.upkeep.audit import Audit, Damaged, audit


def test_a_sound_store(store: Store) -> None:
    assert audit(store) == Audit(0, 0, ())
    ingest(store, "one", [1, 2])
    ingest(store, "two", [2, 3])
    seen: list[tuple[int, int]] = []
    found = audit(store, lambda done, total: seen.append((done, total)))
    files = [store.root / path for path in files_under(store.root)]
    assert found == Audit(len(files), sum(path.stat().st_size for path in files), ())
    assert seen == [(i, len(files)) for i in range(1, len(files) + 1)]


def test_damage_and_loss_name_their_models(store: Store) -> None:
    one, two = ingest(store, "one", [1, 2]), ingest(store, "two", [2, 3])
    flipped, lost, side = one.tensors[1].digest, two.tensors[1].digest, one.side_files[0].blob
    orphan = store.objects.put(some_bytes(9)).tensor.digest
    for digest in (flipped, orphan):
        store.open_tensor(digest)  # tensors that this process has verified before are read again, too
        flip_byte(store.objects.path(digest), -1)
    store.objects.path(lost).unlink()
    flip_byte(store.blobs.path(side), 0)
    expected = [
        Damaged(flipped, ("one", "two")),
        Damaged(lost, ("two",)),
        Damaged(orphan, ()),
        Damaged(side, ("one", "two")),
    ]
    assert audit(store).damaged == tuple(sorted(expected, key=lambda damaged: damaged.digest))


def test_a_changed_manifest_is_found(store: Store) -> None:
    manifest = ingest(store, "one", [1, 2])
    ingest(store, "two", [3])
    with store.catalog.writing() as writer:
        writer._connection.exec_driver_sql("UPDATE weight_entries SET key = 'other' WHERE model = 1 AND position = 0")
    assert audit(store).damaged == (Damaged(manifest.fingerprint, ("one",)),)


def test_ingesting_again_makes_it_sound(store: Store) -> None:
    manifest = ingest(store, "one", [1, 2])
    flip_byte(store.objects.path(manifest.tensors[0].digest), -1)
    flip_byte(store.blobs.path(manifest.side_files[0].blob), 0)
    assert len(audit(store).damaged) == 2
    ingest(store, "one", [1, 2])
    assert audit(store).damaged == ()
