"""Collection removes what no model names, keeps everything else, and stops when in doubt."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.zoo.factory import files_under, ingest, some_bytes
from zoo.errors import StoreBusy, StoreError
from zoo.objects import locks
from zoo.store import Store
from zoo.upkeep import leftovers
from zoo.upkeep.collect import Collected, collect


def remove(store: Store, name: str) -> None:
    with store.catalog.writing() as writer:
        writer.remove_model(name)


def test_what_only_a_removed_model_named_goes(store: Store) -> None:
    ingest(store, "one", [1, 2])
    before = files_under(store.root)
    ingest(store, "two", [2, 3])
    assert collect(store) == Collected(0, 0)
    remove(store, "two")
    planned = collect(store, dry_run=True)
    assert planned.objects_removed == 2  # one tensor, one header
    assert len(files_under(store.root)) == len(before) + 2
    assert collect(store) == planned
    assert files_under(store.root) == before


def test_what_an_interrupted_ingest_left_goes(store: Store) -> None:
    ingest(store, "one", [1])
    before = files_under(store.root)
    orphan = store.objects.put(some_bytes(9)).tensor.digest
    size = store.objects.path(orphan).stat().st_size
    staged = store.objects.shelf.stage([b"half"])
    blob = store.blobs.shelf.stage([b"half"])
    assert collect(store, dry_run=True) == Collected(1, size + 8)
    assert staged.exists()
    assert blob.exists()
    assert collect(store) == Collected(1, size + 8)
    assert files_under(store.root) == before


def test_an_empty_store(store: Store) -> None:
    assert collect(store) == Collected(0, 0)


@pytest.mark.parametrize("kind", ["object", "blob"])
def test_a_missing_object_stops_it(store: Store, kind: str) -> None:
    """The catalogue then is not the one of these objects, or not its newest state."""
    manifest = ingest(store, "one", [1, 2])
    store.objects.put(some_bytes(9))
    if kind == "object":
        store.objects.path(manifest.tensors[0].digest).unlink()
    else:
        store.blobs.path(manifest.side_files[0].blob).unlink()
    before = files_under(store.root)
    with pytest.raises(StoreError, match="nothing was removed"):
        collect(store)
    assert files_under(store.root) == before


def test_an_unreadable_catalogue_stops_it(store: Store) -> None:
    ingest(store, "one", [1])
    store.objects.put(some_bytes(9))
    before = files_under(store.root)
    with store.catalog.writing() as writer:
        writer._connection.exec_driver_sql("DROP TABLE weight_entries")
    with pytest.raises(StoreError, match="database failed"):
        collect(store)
    assert files_under(store.root) == before


def test_it_waits_for_an_ingest_that_found_an_orphan(store: Store) -> None:
    """Between put and commit only the lock protects an orphan that was stored before."""
    store.objects.put(some_bytes(1))
    with store.ingesting():
        put = store.objects.put(some_bytes(1))
        assert not put.new
        with Store.open(store.root) as other, pytest.raises(StoreBusy):
            collect(other, timeout=0.05)
        ingest(store, "one", [1])
    collect(store)
    assert store.objects.check(put.tensor.digest)


def test_other_peoples_files_are_left_alone(store: Store) -> None:
    ingest(store, "one", [1])
    note = store.objects.shelf.root / "ab" / "note.txt"
    note.parent.mkdir(exist_ok=True)
    note.write_text("x")
    collect(store)
    assert note.exists()


def aged(path: Path, seconds: float) -> None:
    for each in (path, *path.rglob("*")):
        os.utime(each, (time.time() - seconds,) * 2)


def test_what_abandoned_runs_left_goes(store: Store) -> None:
    """Files are removed by age; a folder is kept while its run holds it or one of its files is young."""
    work = store.root / "work"
    for name in (
        "old.json",
        "young.json",
        "old/part",
        "young/part",
        "mixed/part",
        "mixed/lock",
        "held/part",
        "held/lock",
    ):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(b"12345")
    for name in ("old.json", "old", "held", "mixed"):
        aged(work / name, leftovers.GRACE_SECONDS + 60)
    for name in ("young.json", "young"):
        aged(work / name, leftovers.GRACE_SECONDS - 60)
    (work / "mixed" / "part").write_bytes(b"123456")
    before = sorted(work.rglob("*"))
    with locks.exclusive(work / "held" / "lock", 0):
        assert collect(store, dry_run=True) == Collected(0, 10)
        assert sorted(work.rglob("*")) == before
        assert collect(store) == Collected(0, 10)
    assert {path.name for path in work.iterdir()} == {"young.json", "young", "mixed", "held"}
    assert collect(store) == Collected(0, 10)
    assert {path.name for path in work.iterdir()} == {"young.json", "young", "mixed"}


def test_a_left_over_link_goes_and_what_it_points_to_stays(store: Store, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_bytes(b"x")
    (store.root / "work").mkdir()
    link = store.root / "work" / "link"
    link.symlink_to(tmp_path / "mine")
    os.utime(link, (0, 0), follow_symlinks=False)
    collect(store)
    assert not link.is_symlink()
    assert (tmp_path / "mine" / "file").exists()
