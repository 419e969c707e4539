"""A store: a folder of objects and blobs with a catalogue and a lock.

    root/objects/ab/abcd…   tensors          root/catalog.sqlite   the catalogue, unless it is in another database
    root/packed/ab/abcd…    packed tensors   root/lock             the store-wide lock
    root/files/ab/abcd…     blobs            root/pack.lock        held by whoever packs
                                             root/store.id         ties the folder to its catalogue

The order that keeps it whole: within `ingesting()`, objects and blobs are put and durable first, then one catalogue
transaction names them. A process killed in between leaves unnamed objects, which a collection removes and the next
ingest uses.

This file knows nothing of checkpoints, surgery or torch.
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
    """What the objects take: their number, their bytes on disk, and the bytes that the models would take each whole."""

    objects: int
    bytes_stored: int
    bytes_logical: int


class Store:
    """Objects, blobs, catalogue and lock of one folder. Safe for any number of threads and processes."""

    def __init__(self, root: Path, catalog: Catalog) -> None:
        """Use `Store.open`."""
        self.root = root
        self.catalog = catalog
        self.objects = ObjectStore(root / "objects", root / "packed")
        self.blobs = BlobStore(root / "files")

    @classmethod
    def open(cls, root: Path, database: str | None = None, create: bool = True) -> Store:
        """Open the store in a folder.

        Args:
            database: SQLAlchemy URL of the catalogue; `root/catalog.sqlite` when None.
            create: make a new store where there is none.

        Raises:
            StoreError: no store is there and `create` is off, the folder or the database cannot be used, or they belong
                to others.
        """
        root = root.absolute()
        if not create and not identity.is_store(root):
            raise StoreError(f"there is no store in {root}")
        name = identity.folder_identity(root)
        store = cls(root, Catalog(database or URL.create("sqlite", database=str(root / "catalog.sqlite"))))
        try:
            identity.tie(store.catalog, name, root, is_empty=next(store.objects.digests(), None) is None)
        except BaseException:
            store.close()
            raise
        return store

    @contextmanager
    def ingesting(self, timeout: float = INGEST_SECONDS) -> Iterator[None]:
        """Hold the store's lock together with others: nothing is collected meanwhile. Hold it from before the first put
        until the catalogue has committed. When the body fails, what it put and nobody names is removed again, unless
        others hold the lock.

        Raises:
            StoreBusy: a collection ran for longer than `timeout` seconds.
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
        """Hold the store's lock together with others, for readers that need their objects to stay: exports, loads,
        audits.
        """
        with locks.shared(self.root / "lock", timeout):
            yield

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Be the only one that packs or unpacks. Raises StoreBusy when another one does."""
        with locks.exclusive(self.root / "pack.lock", 0.0):
            yield

    @contextmanager
    def collecting(self, timeout: float = COLLECT_SECONDS) -> Iterator[None]:
        """Hold the store's lock alone. Raises StoreBusy when ingests or readers hold it for longer than `timeout`
        seconds.
        """
        with locks.exclusive(self.root / "lock", timeout):
            yield

    def open_tensor(self, digest: str) -> OpenedTensor | Decoded:
        """`objects.open`, with the models that a damaged object hurts named in the error. Raises DamagedObject."""
        try:
            return self.objects.open(digest)
        except DamagedObject as error:
            raise self.blamed(digest, error) from error

    def read_blob(self, digest: str) -> bytes:
        """`blobs.get`, with the models that a damaged blob hurts named in the error. Raises DamagedObject."""
        try:
            return self.blobs.get(digest)
        except DamagedObject as error:
            raise self.blamed(digest, error) from error

    def blamed(self, digest: str, error: DamagedObject) -> DamagedObject:
        """The same error, naming the models that need the object."""
        with self.catalog.reading() as reader:
            models = reader.users_of([digest]).get(digest, ())
        if not models:
            return error
        return DamagedObject(f"{error}; it is part of {', '.join(models)}: ingest one of them again to repair it")

    def usage(self) -> Usage:
        """What is on disk, against what the models would take without sharing. Lists every object."""
        sizes = [self.objects.size(digest) for digest in self.objects.digests()]
        with self.catalog.reading() as reader:
            logical = sum(model.bytes for model in reader.models())
        return Usage(len(sizes), sum(sizes), logical)

    def _withdraw(self) -> None:
        """Best effort: what cannot be removed now is left to the next collection."""
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
