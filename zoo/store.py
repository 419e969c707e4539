"""A store: a folder of objects (tensors) and blobs (small files) with a catalogue and a lock.

    root/objects/ab/abcd…   tensors          root/catalog.sqlite   the catalogue, unless it is in another database
    root/packed/ab/abcd…    packed tensors   root/lock             the store-wide lock
    root/files/ab/abcd…     blobs            root/pack.lock        held while packing
                                             root/store.id         ties the folder to its catalogue

Write order: within `ingesting()`, objects and blobs are written and made durable first, then one catalogue transaction
references them. A process killed in between leaves unreferenced objects, which a collection removes or the next ingest
reuses.

This module does not depend on checkpoints, `surgery` or torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sqlalchemy import URL

from zoo.catalog import Catalog
from zoo.errors import DamagedObject, StoreError
from zoo.objects import identity, locks
from zoo.objects.blobs import BlobStore
from zoo.objects.objects import Decoded, ObjectStore, OpenedTensor
from zoo.upkeep.collect import withdraw

#: Seconds to wait for the store-wide lock.
INGEST_SECONDS = 600.0
COLLECT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Disk usage of the objects.

    Fields:
        bytes_stored: Bytes on disk.
        bytes_logical: Bytes that the models would take if each were stored whole.
    """

    objects: int
    bytes_stored: int
    bytes_logical: int


class Store:
    """Objects, blobs, catalogue and lock of one folder. Safe for any number of threads and processes."""

    def __init__(self, root: Path, catalog: Catalog) -> None:
        """Build a store from its parts; use `Store.open` instead."""
        self.root = root
        self.catalog = catalog
        self.objects = ObjectStore(root / "objects", root / "packed")
        self.blobs = BlobStore(root / "files")

    @classmethod
    def open(cls, root: Path, database: str | None = None, create: bool = True) -> Store:
        """Open the store in a folder.

        Args:
            database: SQLAlchemy URL of the catalogue; `root/catalog.sqlite` when None.
            create: Create a store if the folder has none.

        Raises:
            StoreError: There is no store and `create` is off, the folder or the database cannot be used, or either
                belongs to another store.
        """
        root = root.absolute()
        if not create and not identity.is_store(root):
            raise StoreError(f"there is no store in {root}")
        name = identity.folder_identity(root)
        store = cls(root, Catalog(database or URL.create("sqlite", database=str(root / "catalog.sqlite"))))
        try:
            identity.tie(store.catalog, name, root, store.objects.is_empty)
        except BaseException:
            store.close()
            raise
        return store

    @contextmanager
    def ingesting(self, timeout: float = INGEST_SECONDS) -> Iterator[None]:
        """Hold the store's lock in shared mode for an ingest, so that nothing is collected meanwhile.

        Hold it from before the first put until the catalogue has committed. If the body fails, objects and blobs that
        it published and no model references are removed again, unless another ingest or reader holds the lock.

        Raises:
            StoreBusy: A collection ran for longer than `timeout` seconds.
        """
        try:
            with self.keeping(timeout):
                yield
        except Exception:
            self._withdraw()
            raise
        self._forget_published()

    @contextmanager
    def keeping(self, timeout: float = INGEST_SECONDS) -> Iterator[None]:
        """Hold the store's lock in shared mode for readers that need their objects to stay (exports, loads, audits).

        Raises StoreBusy.
        """
        with locks.shared(self.root / "lock", timeout):
            yield

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Hold the packing lock, so that only one process packs or unpacks. Raises StoreBusy if it is held."""
        with locks.exclusive(self.root / "pack.lock", 0.0):
            yield

    @contextmanager
    def collecting(self, timeout: float = COLLECT_SECONDS) -> Iterator[None]:
        """Hold the store's lock exclusively.

        Raises:
            StoreBusy: Ingests or readers held it for longer than `timeout` seconds.
        """
        with locks.exclusive(self.root / "lock", timeout):
            yield

    def open_tensor(self, digest: str) -> OpenedTensor | Decoded:
        """Open an object as `objects.open` does. Raises DamagedObject that names the affected models."""
        try:
            return self.objects.open(digest)
        except DamagedObject as error:
            raise self.blamed(digest, error) from error

    def read_blob(self, digest: str) -> bytes:
        """Read a blob as `blobs.get` does. Raises DamagedObject that names the affected models."""
        try:
            return self.blobs.get(digest)
        except DamagedObject as error:
            raise self.blamed(digest, error) from error

    def blamed(self, digest: str, error: DamagedObject) -> DamagedObject:
        """Return the error with the names of the models that need the object added."""
        with self.catalog.reading() as reader:
            models = reader.users_of([digest]).get(digest, ())
        if not models:
            return error
        return DamagedObject(f"{error}; it is part of {', '.join(models)}: ingest one of them again to repair it")

    def usage(self) -> Usage:
        """Return the bytes on disk and the bytes that the models would take without sharing. Lists every object."""
        sizes = [self.objects.size(digest) for digest in self.objects.digests()]
        with self.catalog.reading() as reader:
            logical = sum(model.bytes for model in reader.models())
        return Usage(len(sizes), sum(sizes), logical)

    def _withdraw(self) -> None:
        """Remove what a failed ingest published; what cannot be removed now is left to the next collection."""
        objects, blobs = self.objects.shelf.take_published(), self.blobs.shelf.take_published()
        with suppress(StoreError):
            withdraw(self, objects, blobs)

    def _forget_published(self) -> None:
        self.objects.shelf.take_published()
        self.blobs.shelf.take_published()

    def close(self) -> None:
        self.catalog.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
