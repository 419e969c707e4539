"""Stores and databases for the store's tests. Tests with `database_url` run on SQLite and on PostgreSQL."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from tests.zoo import postgres
from zoo.catalog import Catalog
from zoo.store import Store


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    binaries = postgres.find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is NOT tested here: no initdb and pg_ctl (Debian: apt-get install postgresql)")
    with postgres.cluster(binaries) as url:
        yield url


_numbers = itertools.count()


def _new_database(server: str) -> str:
    name = f"zoo{next(_numbers)}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return make_url(server).set(database=name).render_as_string(hide_password=False)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    return _new_database(request.getfixturevalue("postgres_server"))


@pytest.fixture
def catalog(database_url: str) -> Iterator[Catalog]:
    catalog = Catalog(database_url)
    yield catalog
    catalog.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as store:
        yield store
