"""The store as a whole: it opens anywhere, belongs to one catalogue, and withdraws failed ingests.

Damage is reported with the models it affects.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from tests.zoo.factory import files_under, flip_byte, ingest, manifest_of, some_bytes
from zoo.errors import DamagedObject, InputError, StoreBusy, StoreError, StoreFull
from zoo.store import Store, Usage
from zoo.upkeep.collect import collect


def test_a_store_is_there_again(tmp_path: Path) -> None:
    with Store.open(tmp_path / "new" / "store") as store:
        manifest = ingest(store, "a", [1, 2])
    with Store.open(tmp_path / "new" / "store", create=False) as store, store.catalog.reading() as reader:
        assert reader.model("a") == manifest


def test_a_store_is_not_made_unless_asked_for(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        Store.open(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["with space", "50%25 ä?x=1&y#z", "semi;colon"])
def test_any_folder_name_will_do(tmp_path: Path, name: str) -> None:
    with Store.open(tmp_path / name) as store:
        ingest(store, "a", [1])
    assert (tmp_path / name / "catalog.sqlite").is_file()
    with Store.open(tmp_path / name, create=False) as store, store.catalog.reading() as reader:
        assert reader.names() == ["a"]


def test_a_folder_that_holds_only_a_gitignore_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*\n")
    with Store.open(tmp_path):
        assert (tmp_path / ".gitignore").read_text() == "*\n"


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="there can be no store"):
        Store.open(tmp_path / "file")


def test_another_database_holds_the_catalogue(tmp_path: Path, database_url: str) -> None:
    with Store.open(tmp_path / "store", database_url) as store:
        manifest = ingest(store, "a", [1, 2])
        ingest(store, "b", [2, 3])
        with store.catalog.writing() as writer:
            writer.remove_model("b")
        assert collect(store).objects_removed == 2
    with Store.open(tmp_path / "store", database_url) as store, store.catalog.reading() as reader:
        assert reader.model("a") == manifest
    assert not (tmp_path / "store" / "catalog.sqlite").exists()


def test_a_new_catalogue_is_refused_for_a_folder_with_objects(tmp_path: Path) -> None:
    """Otherwise a collection would remove every object as unused."""
    with Store.open(tmp_path / "store") as store:
        ingest(store, "a", [1])
    with pytest.raises(StoreError, match="catalogue is new and empty"):
        Store.open(tmp_path / "store", f"sqlite:///{tmp_path / 'other.sqlite'}")


def test_opening_a_store_again_lists_no_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(tmp_path) as store:
        store.objects.put(some_bytes(1))
        assert not store.objects.is_empty()
    monkeypatch.setattr("zoo.objects.publish._listing", lambda folder: pytest.fail(f"listed {folder}"))
    Store.open(tmp_path, create=False).close()


def test_a_catalogue_serves_one_folder(tmp_path: Path, database_url: str) -> None:
    Store.open(tmp_path / "one", database_url).close()
    with pytest.raises(StoreError, match="belongs to another store"):
        Store.open(tmp_path / "two", database_url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "cannot be used"),
        ("nosuch://host/db", "cannot be used"),
        ("sqlite://", "in memory"),
        ("postgresql+psycopg://nobody:secret@127.0.0.1:1/none", "database failed"),
    ],
)
def test_a_database_that_cannot_be_used(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as caught:
        Store.open(tmp_path, url)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite").write_bytes(b"this is no database at all, but it is long enough" * 100)
    with pytest.raises(StoreError, match="not a database"):
        Store.open(tmp_path)


def test_a_failed_ingest_is_withdrawn(store: Store) -> None:
    ingest(store, "a", [1, 2])
    before = files_under(store.root)
    with pytest.raises(InputError), store.ingesting():
        list(store.objects.put_many(some_bytes(seed) for seed in (2, 3, 4)))
        store.blobs.put(b"new")
        store.blobs.put(b"{}")
        raise InputError("the checkpoint is bad")
    assert files_under(store.root) == before
    assert collect(store).objects_removed == 0


def test_a_failed_ingest_leaves_what_others_may_need(store: Store) -> None:
    with pytest.raises(InputError), store.ingesting():
        put = store.objects.put(some_bytes(1))
        with Store.open(store.root) as other, other.ingesting():
            assert not other.objects.put(some_bytes(1)).new
            raise InputError("the checkpoint is bad")
    assert store.objects.has(put.tensor.digest) is False  # the last ingest to end withdraws it
    with store.ingesting():
        put = store.objects.put(some_bytes(1))
        with Store.open(store.root) as other, pytest.raises(InputError), other.ingesting():
            other.objects.put(some_bytes(2))
            raise InputError("the checkpoint is bad")
    assert store.objects.has(put.tensor.digest)


def test_an_interrupted_ingest_keeps_its_objects_for_the_next(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt), store.ingesting():
        store.objects.put(some_bytes(1))
        raise KeyboardInterrupt
    with store.ingesting():
        assert not store.objects.put(some_bytes(1)).new


def test_ingests_and_a_collection_exclude_each_other(store: Store) -> None:
    with store.ingesting(), pytest.raises(StoreBusy), store.collecting(timeout=0):
        pass
    with store.collecting(), pytest.raises(StoreBusy), store.ingesting(timeout=0):
        pass


def test_damage_names_the_models_it_hurts(store: Store) -> None:
    tensor = ingest(store, "one", [1, 2]).tensors[1]
    ingest(store, "two", [2, 3])
    assert store.open_tensor(tensor.digest).tensor == tensor
    flip_byte(store.objects.path(tensor.digest), -1)
    with pytest.raises(DamagedObject, match="it is part of one, two") as caught:
        store.open_tensor(tensor.digest)
    assert "\n" not in str(caught.value)
    side = store.blobs.put(b"{}")
    flip_byte(store.blobs.path(side), 0)
    with pytest.raises(DamagedObject, match="it is part of one, two"):
        store.read_blob(side)


def test_damage_that_hurts_nobody(store: Store) -> None:
    with pytest.raises(DamagedObject, match=r"missing from the store$"):
        store.open_tensor("0" * 64)


def test_ingesting_again_heals(store: Store) -> None:
    tensor = ingest(store, "one", [1]).tensors[0]
    flip_byte(store.objects.path(tensor.digest), -1)
    ingest(store, "one", [1])
    assert store.open_tensor(tensor.digest).tensor == tensor


def test_usage(store: Store) -> None:
    assert store.usage() == Usage(0, 0, 0)
    first, second = ingest(store, "one", [1, 2]), ingest(store, "two", [2, 3])
    header = store.objects.open(first.tensors[0].digest).offset
    assert store.usage() == Usage(3, 3 * (100 + header), 4 * 100)
    assert first.tensors[1] == second.tensors[0]


FULL_DISK = """
import resource, sys
from pathlib import Path
from tests.zoo.factory import ingest
from zoo.errors import StoreFull
from zoo.store import Store
store = Store.open(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    ingest(store, "large", [1, 2, 3], size=300_000)
except StoreFull as error:
    print(error)
"""


def test_a_full_disk_is_one_line_and_leaves_nothing(store: Store) -> None:
    """Uses the system's limit on file sizes, in a process of its own."""
    ingest(store, "a", [1])
    before = files_under(store.root)
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(store.root)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("no space left in")
    assert done.stdout.count("\n") == 1
    assert files_under(store.root) == before


def test_a_catalogue_without_room_says_so(store: Store) -> None:
    with pytest.raises(StoreFull, match="catalogue"), store.catalog.writing() as writer:
        writer._connection.exec_driver_sql("PRAGMA max_page_count=1")
        tensors = [store.objects.put(some_bytes(seed)).tensor for seed in range(300)]
        writer.put_model(manifest_of("a", tensors))


def test_the_first_opening_of_many_processes(tmp_path: Path) -> None:
    """Several processes make the folder, its name, the database and its tables at once."""
    code = "import sys; from pathlib import Path; from zoo.store import Store; Store.open(Path(sys.argv[1])).close()"
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store")], stderr=subprocess.PIPE)
        for _ in range(6)
    ]
    for child in children:
        _, errors = child.communicate(timeout=60)
        assert (child.returncode, errors) == (0, b"")
    engine = create_engine(f"sqlite:///{tmp_path / 'store' / 'catalog.sqlite'}")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM settings")).scalar() == 1
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
    engine.dispose()
