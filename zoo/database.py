"""A database behind a SQLAlchemy URL: connections, transactions, timeouts and error translation.

SQLite: WAL, foreign keys on, synchronous=FULL (a commit survives a power cut). A writing transaction begins with BEGIN
IMMEDIATE: SQLite refuses one that reads first and writes later as busy at once, whatever the timeout.

PostgreSQL: writers take an advisory lock. So on both databases there is one writer at a time; readers see one snapshot
and never wait. A statement fails after about `SILENT_SECONDS` in which its server cannot be reached, and with it the
transaction: a writer keeps the ones behind it no longer where its network hangs.

The catalogue and the queue of requests are kept in such databases; nothing here depends on their tables.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DataError, DBAPIError, PendingRollbackError, SQLAlchemyError

from zoo.errors import InputError, StoreBusy, StoreError, StoreFull, ZooError

#: Seconds that a writing transaction waits for the one before it.
BUSY_SECONDS = 60
#: Seconds for which a PostgreSQL server may send nothing: neither acknowledge what it is sent, nor answer probes, nor
#: take a connection. Well below what a writer waits.
SILENT_SECONDS = 20
#: Drivers that pass libpq's options on.
_LIBPQ = frozenset({"psycopg", "psycopg2"})
_WRITING = "blockzoo_writing"
#: An option of a transaction, and what its connection is set to: a statement is needed only where they differ.
_SYNCHRONOUS = "blockzoo_synchronous"
_FULL, _NORMAL = "FULL", "NORMAL"
#: What PostgreSQL's driver says of a text that it cannot send.
_NUL = "cannot contain NUL"
_NOT_SYNCED = text("SET LOCAL synchronous_commit = off")


class Database:
    """A database of any number of threads and processes, but not across a fork. Nothing is connected before first use.

    Args:
        name: What messages call it.
        lock: Number of the advisory lock that writers take on PostgreSQL.
        idle: Seconds after which PostgreSQL ends a transaction in which no statement comes: a process that was stopped
            holds no lock longer. None: no limit.

    Raises StoreError for a URL or driver that cannot be used.
    """

    def __init__(self, url: str | URL, name: str, lock: int, idle: float | None = None) -> None:
        self._name = name
        self._lock = lock
        self._idle = idle
        self.engine = self._make_engine(url)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a transaction on one consistent snapshot."""
        options: dict[str, Any] = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ"}
        with self.explained(), self.engine.connect() as connection, connection.execution_options(**options).begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Open the single writing transaction: committed at the end, rolled back on any error.

        Raises StoreBusy if it is not granted in time.
        """
        with (
            self.explained(),
            self.engine.connect() as connection,
            connection.execution_options(**{_WRITING: True}).begin(),
        ):
            if self.engine.dialect.name == "postgresql":
                connection.execute(text(f"SET LOCAL lock_timeout = '{BUSY_SECONDS}s'"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": self._lock})
            yield connection

    @contextmanager
    def writing_on(self, connection: Connection, synced: bool = True) -> Iterator[Connection]:
        """Open a writing transaction on a connection that the caller keeps, without the writers' lock.

        Not `synced`: the commit survives the end of this process, but the latest ones may be lost with the power
        (SQLite) or with the database server (PostgreSQL). The next synced one makes all before it durable.
        """
        options = {_WRITING: True, _SYNCHRONOUS: _FULL if synced else _NORMAL}
        with self.explained():
            try:
                with connection.execution_options(**options).begin():
                    if not synced and not self.is_sqlite:
                        connection.execute(_NOT_SYNCED)
                    yield connection
            except DBAPIError:
                if self.is_sqlite:  # a failed COMMIT may leave the transaction open, also to what comes next
                    connection.connection.rollback()
                raise

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Translate database errors into the store's errors, with one-line messages."""
        try:
            yield
        except DBAPIError as error:
            raise self._translated(error) from error
        except PendingRollbackError as error:  # a statement before has said why, and was answered for itself
            raise StoreError(f"the {self._name}'s connection was lost within a transaction") from error

    def close(self) -> None:
        """Close the connections; using the database again opens new ones."""
        self.engine.dispose()

    def _make_engine(self, url: str | URL) -> Engine:
        try:
            parsed = make_url(url)
            if parsed.get_backend_name() != "sqlite":
                return self._limited(create_engine(parsed, pool_pre_ping=True, connect_args=network_options(parsed)))
            if parsed.database in (None, "", ":memory:"):
                raise StoreError(f"the {self._name} cannot live in memory: name a database file")
            engine = create_engine(parsed, connect_args={"timeout": BUSY_SECONDS})
        except (SQLAlchemyError, ImportError) as error:
            raise StoreError(f"this database URL cannot be used: {_first_line(error)}") from error
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _limited(self, engine: Engine) -> Engine:
        """Let the server's side of each connection end transactions that are idle too long."""
        if self._idle is None or engine.dialect.name != "postgresql":
            return engine
        setting = f"SET idle_in_transaction_session_timeout = {max(1, round(self._idle * 1000))}"

        @event.listens_for(engine, "connect")
        def limit(connection: Any, _record: object) -> None:
            with connection.cursor() as cursor:
                cursor.execute(setting)
            connection.commit()

        return engine

    def _translated(self, error: DBAPIError) -> ZooError:
        if isinstance(error, DataError) and _NUL in str(error.orig):  # clients may name anything
            return InputError(f"a text with the character NUL cannot be in the {self._name}")
        code = getattr(error.orig, "sqlite_errorname", None) or getattr(error.orig, "sqlstate", None) or ""
        if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")) or code == "55P03":
            return StoreBusy(f"another process is writing to the {self._name} (waited {BUSY_SECONDS} s)")
        if code == "SQLITE_FULL" or code == "53100":
            return StoreFull(f"no space left for the {self._name}")
        return StoreError(f"the {self._name}'s database failed: {_first_line(error.orig or error)}")


def network_options(url: URL) -> dict[str, int]:
    """Return the driver's options for connections that hang: those that libpq has and the URL does not give itself.

    They have no effect on Unix-domain sockets; `tcp_user_timeout` has none but on Linux.
    """
    if url.get_backend_name() != "postgresql" or url.get_driver_name() not in _LIBPQ:
        return {}
    options = {
        "connect_timeout": SILENT_SECONDS,
        "keepalives": 1,
        "keepalives_idle": SILENT_SECONDS // 2,
        "keepalives_interval": SILENT_SECONDS // 4,
        "keepalives_count": 2,
        "tcp_user_timeout": SILENT_SECONDS * 1000,
    }
    return {name: value for name, value in options.items() if name not in url.query}


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # disables the driver's own BEGIN; `_begin_sqlite` issues it
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA synchronous={_FULL}")
    connection.execute("PRAGMA foreign_keys=ON")


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    synchronous = options.get(_SYNCHRONOUS, _FULL)
    if connection.info.get(_SYNCHRONOUS, _FULL) != synchronous:
        connection.exec_driver_sql(f"PRAGMA synchronous={synchronous}")
        connection.info[_SYNCHRONOUS] = synchronous
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITING, False) else "BEGIN")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
