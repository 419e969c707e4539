"""What the zoo knows: which models there are, what they are made of, and who shares what. Bytes are elsewhere.

    catalog = Catalog("sqlite:////path/catalog.sqlite")
    with catalog.reading() as reader:
        manifest = reader.model(reader.resolve("7b"))

This package knows nothing of objects on disk, of torch or of serving.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import URL

from zoo.catalog.engine import make_engine, migrate, reading, writing
from zoo.catalog.reader import Reader
from zoo.catalog.summaries import ModelSummary
from zoo.catalog.writer import Writer

__all__ = ["Catalog", "ModelSummary", "Reader", "Writer"]


class Catalog:
    """The catalogue behind a SQLAlchemy URL. Safe for any number of threads and processes; not across a fork."""

    def __init__(self, url: str | URL) -> None:
        """Connect, and bring the tables to the newest version.

        Raises:
            StoreError: the database cannot be reached or used, or is of a newer version than this software.
            StoreBusy: another process held the database for too long.
        """
        self._engine = make_engine(url)
        migrate(self._engine)

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """A snapshot. Writers do not wait for it, nor it for them."""
        with reading(self._engine) as connection:
            yield Reader(connection)

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """One transaction, alone in writing: all of it happens, durably, or none of it. Raises StoreBusy when its turn
        does not come.
        """
        with writing(self._engine) as connection:
            yield Writer(connection)

    def close(self) -> None:
        """Let go of the connections; using the catalogue again opens new ones."""
        self._engine.dispose()
