"""Migrations: empty and older databases reach the newest version, which equals the schema; newer ones are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text

from tests.zoo.factory import manifest_of
from zoo.catalog import Catalog, migrations
from zoo.catalog.engine import open_database
from zoo.catalog.schema import Base
from zoo.errors import StoreError
from zoo.manifest import TensorMeta
from zoo.records import KeyUsage

MANIFEST = manifest_of("a", [TensorMeta("a" * 64, "F32", (2,))])


def test_the_newest_version_is_the_last_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    assert ScriptDirectory.from_config(config).get_heads() == [migrations.HEAD]


def test_an_empty_database_gets_the_tables_of_the_schema(database_url: str) -> None:
    Catalog(database_url).close()
    engine = create_engine(database_url)
    with engine.connect() as connection:
        options = {"version_table": migrations.VERSION_TABLE, "compare_type": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata) == []
        assert (
            connection.execute(text(f"SELECT version_num FROM {migrations.VERSION_TABLE}")).scalar() == migrations.HEAD  # noqa: S608
        )
    engine.dispose()


def test_usage_of_before_it_was_counted_by_model_is_kept(database_url: str) -> None:
    database = open_database(database_url)
    with database.writing() as connection:
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        config.attributes["connection"] = connection
        command.upgrade(config, "0004")
        connection.execute(
            text("INSERT INTO client_keys VALUES (1, 'one', :digest, '[]', 5, NULL, 0, '2026-01-02 03:04:05', NULL)"),
            {"digest": "d" * 64},
        )
        for day in (1, 2):
            row = {"day": f"2026-01-0{day}", "tokens": day << 40}
            connection.execute(text("INSERT INTO key_usage VALUES ('one', :day, 3, :tokens, 5)"), row)
    database.close()
    for _ in range(2):
        catalog = Catalog(database_url)
        with catalog.writing() as writer:
            (key,), usage = writer.keys(), writer.key_usage("2000-01-01")
            writer.add_key_usage([KeyUsage("one", "2026-01-02", 1), KeyUsage("one", "2026-01-02", model="a", cost=9)])
        catalog.close()
    assert (key.name, key.requests_per_minute, key.money_per_day, key.money_per_month) == ("one", 5, None, None)
    assert usage == [
        KeyUsage("one", "2026-01-01", 3, 1 << 40, 5),
        KeyUsage("one", "2026-01-02", 4, 2 << 40, 5),
        KeyUsage("one", "2026-01-02", model="a", cost=9),
    ]
    test_an_empty_database_gets_the_tables_of_the_schema(database_url)


def test_an_existing_database_keeps_what_it_holds(database_url: str) -> None:
    for _ in range(2):
        catalog = Catalog(database_url)
        with catalog.writing() as writer:
            writer.put_model(MANIFEST)
            assert writer.names() == ["a"]
        catalog.close()


def test_a_half_made_database_is_made_whole(database_url: str) -> None:
    """An interrupted first opening may leave a version table without a row on databases without transactional DDL."""
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {migrations.VERSION_TABLE} (version_num VARCHAR(32) NOT NULL)"))
    catalog = Catalog(database_url)
    with catalog.reading() as reader:
        assert reader.names() == []
    catalog.close()
    engine.dispose()


def test_a_newer_database_is_refused(database_url: str) -> None:
    Catalog(database_url).close()
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {migrations.VERSION_TABLE} SET version_num = '9999'"))  # noqa: S608
    with pytest.raises(StoreError, match="'9999', which this software does not know"):
        Catalog(database_url)
    engine.dispose()


def test_someone_elses_database_is_left_alone(database_url: str) -> None:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE models (id INTEGER)"))
    with pytest.raises(StoreError, match="already exists"):
        Catalog(database_url)
    assert inspect(engine).get_table_names() == ["models"]
    engine.dispose()


def test_several_processes_migrate_at_once(database_url: str) -> None:
    code = "import sys; from zoo.catalog import Catalog; Catalog(sys.argv[1]).close()"
    children = [subprocess.Popen([sys.executable, "-c", code, database_url], stderr=subprocess.PIPE) for _ in range(4)]
    for child in children:
        _, errors = child.communicate(timeout=60)
        assert (child.returncode, errors) == (0, b"")
    test_an_empty_database_gets_the_tables_of_the_schema(database_url)
