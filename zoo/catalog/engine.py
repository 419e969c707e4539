"""Connections to the catalogue's database: transactions, timeouts, error translation and migration.

SQLite: WAL, foreign keys on, synchronous=FULL (a commit survives a power cut). A writing transaction begins with BEGIN
IMMEDIATE: SQLite refuses one that reads first and writes later as busy at once, whatever the timeout.

PostgreSQL: writers take an advisory lock. So on both databases there is one writer at a time; readers see one snapshot
and never wait.

This module depends on the version of the tables, not on the tables.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from zoo.catalog import migrations
from zoo.errors import StoreBusy, StoreError, StoreFull

#: Seconds that a writing transaction waits for the one before it.
BUSY_SECONDS = 60
#: Advisory lock of the catalogue's writers: an arbitrary number ("blockzoo" in ASCII).
_ADVISORY_LOCK = 0x626C6F636B7A6F6F
_WRITING = "blockzoo_writing"
#: Serialises migrations: Alembic keeps the running migration in module variables.
_MIGRATING = threading.Lock()


def make_engine(url: str | URL) -> Engine:
    """Return an engine for a SQLAlchemy URL without connecting.

    Raises StoreError for a URL or driver that cannot be used.
    """
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            return create_engine(parsed, pool_pre_ping=True)
        if parsed.database in (None, "", ":memory:"):
            raise StoreError("the catalogue cannot live in memory: name a database file")
        engine = create_engine(parsed, connect_args={"timeout": BUSY_SECONDS})
    except (SQLAlchemyError, ImportError) as error:
        raise StoreError(f"this database URL cannot be used: {_first_line(error)}") from error
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Open a transaction on one consistent snapshot."""
    options: dict[str, Any] = {} if _is_sqlite(engine) else {"isolation_level": "REPEATABLE READ"}
    with _explained(), engine.connect() as connection, connection.execution_options(**options).begin():
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """Open the single writing transaction: committed at the end, rolled back on any error.

    Raises StoreBusy if it is not granted in time.
    """
    with _explained(), engine.connect() as connection, connection.execution_options(**{_WRITING: True}).begin():
        if engine.dialect.name == "postgresql":
            connection.execute(text(f"SET LOCAL lock_timeout = '{BUSY_SECONDS}s'"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        yield connection


def migrate(engine: Engine) -> None:
    """Bring the tables to the newest version. Safe when several processes do it at once.

    Raises:
        StoreError: The catalogue was written by a newer version of this software.
    """
    with reading(engine) as connection:
        if _version(connection) == migrations.HEAD:
            return
    with _MIGRATING, writing(engine) as connection:
        version = _version(connection)  # another process may have migrated meanwhile
        if version != migrations.HEAD:
            _upgrade(connection, version)


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(migrations.VERSION_TABLE):
        return None
    version: str | None = connection.execute(text(f"SELECT version_num FROM {migrations.VERSION_TABLE}")).scalar()  # noqa: S608
    return version


def _upgrade(connection: Connection, version: str | None) -> None:
    # Imported here, since a store at the newest version (the usual case) does not need Alembic.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if version is not None and version not in known:
        raise StoreError(
            f"the catalogue has version {version!r}, which this software does not know: it is too old for this store"
        )
    command.upgrade(config, "head")


def _is_sqlite(engine: Engine) -> bool:
    return engine.dialect.name == "sqlite"


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # disables the driver's own BEGIN; `_begin_sqlite` issues it
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")


def _begin_sqlite(connection: Connection) -> None:
    immediate = connection.get_execution_options().get(_WRITING, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


@contextmanager
def _explained() -> Iterator[None]:
    """Translate database errors into the store's errors, with one-line messages."""
    try:
        yield
    except DBAPIError as error:
        raise _translated(error) from error


def _translated(error: DBAPIError) -> StoreError:
    code = getattr(error.orig, "sqlite_errorname", None) or getattr(error.orig, "sqlstate", None) or ""
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) or code == "55P03":
        return StoreBusy(f"another process is writing to the catalogue (waited {BUSY_SECONDS} s)")
    if code == "SQLITE_FULL" or code == "53100":
        return StoreFull("no space left for the catalogue")
    return StoreError(f"the catalogue's database failed: {_first_line(error.orig or error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
