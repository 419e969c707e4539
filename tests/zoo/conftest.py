"""Stores and databases for the store's tests. Tests with `database_url` run on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import postgres
from zoo.catalog import Catalog
from zoo.store import Store


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    return postgres.new_database(request.getfixturevalue("postgres_server"))


@pytest.fixture
def catalog(database_url: str) -> Iterator[Catalog]:
    catalog = Catalog(database_url)
    yield catalog
    catalog.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as store:
        yield store
