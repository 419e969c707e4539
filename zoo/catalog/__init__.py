"""The catalogue: a database of the models, what they are made of, and what they share. The bytes are elsewhere.

    catalog = Catalog("sqlite:////path/catalog.sqlite")
    with catalog.reading() as reader:
        manifest = reader.model(reader.resolve("7b"))

This package does not depend on the objects on disk, torch or serving.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import URL

from zoo.catalog.engine import migrate, open_database
from zoo.catalog.reader import Reader
from zoo.catalog.summaries import ModelConfig, ModelEntry, ModelSummary
from zoo.catalog.writer import Writer

__all__ = ["Catalog", "ModelConfig", "ModelEntry", "ModelSummary", "Reader", "Writer"]


class Catalog:
    """The catalogue behind a SQLAlchemy URL. Safe for any number of threads and processes, but not across a fork."""

    def __init__(self, url: str | URL) -> None:
        """Connect and bring the tables to the newest version.

        Raises:
            StoreError: The database cannot be reached or used, or has a newer version than this software.
            StoreBusy: Another process held the database for too long.
        """
        self._database = open_database(url)
        migrate(self._database)

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open a snapshot for reading. Readers and writers do not block each other."""
        with self._database.reading() as connection:
            yield Reader(connection)

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """Open the single writing transaction: committed durably at the end, rolled back on any error.

        Raises StoreBusy if other writers hold it for too long.
        """
        with self._database.writing() as connection:
            yield Writer(connection)

    def close(self) -> None:
        """Close the connections; using the catalogue again opens new ones."""
        self._database.close()
