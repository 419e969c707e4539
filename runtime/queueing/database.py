"""Open the durable queue: a folder with an SQLite database, or a PostgreSQL database. One server at a time has it.

SQLite: the folder is locked (`flock`) and readable by its owner only. PostgreSQL: a session holds an advisory lock, and
everything is written in that session; so a server that has lost the session, and with it the lock, writes nothing more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import Connection, insert, inspect, select, text, update
from sqlalchemy.engine import make_url

from runtime.queueing.schema import VERSION, QueueBase, QueueRow
from zoo.database import Database
from zoo.errors import InputError, StoreBusy, StoreError
from zoo.objects.locks import exclusive

#: Seconds that a server waits for the one before it to let the queue go: its death may take a moment.
PATIENCE = 10.0
#: Advisory lock of the server that has the queue: an arbitrary number ("zooqueue" in ASCII).
_ADVISORY_LOCK = 0x7A6F6F7175657565
_PAUSE = 0.1
_FILE = "queue.sqlite"


class QueueDatabase:
    """The database of the queue, held by this process until `close`.

    Args:
        target: A folder, or a URL `postgresql://…`.
        patience: Seconds to wait for another server to let it go.

    Attributes:
        folder: The folder; None for PostgreSQL.

    Raises:
        InputError: The target is neither, or a folder of other things.
        StoreBusy: Another server has the queue.
        StoreError: The database cannot be used, or its tables have another version than this software.
    """

    def __init__(self, target: str | Path, patience: float = PATIENCE) -> None:
        self._stack = ExitStack()
        self._writes = threading.Lock()
        self._writer: Connection | None = None
        self._openings = 0
        try:
            self.folder, url = _folder_and_url(target)
            if self.folder is not None:
                self._stack.enter_context(_locked(self.folder, patience))
            self._database = Database(url, "queue", _ADVISORY_LOCK)
            self._stack.callback(self._database.close)
            with self._database.explained():
                self._writer = self._take_lock(patience)
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def is_sqlite(self) -> bool:
        return self._database.is_sqlite

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a transaction on one consistent snapshot. Any thread; waits for no writer."""
        with self._database.reading() as connection:
            yield connection

    @contextmanager
    def writing(self, synced: bool = True) -> Iterator[Connection]:
        """Open a writing transaction; one at a time. Any thread. Not `synced`: see `Database.writing_on`.

        Raises StoreError, also once another server has taken the queue over.
        """
        with self._writes, self._database.writing_on(self._held(), synced) as connection:
            yield connection

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Translate database errors into the store's errors."""
        with self._database.explained():
            yield

    def close(self) -> None:
        """Let the queue go. May be called again."""
        with self._writes:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            self._stack.close()

    def _held(self) -> Connection:
        """Return the connection that holds the lock; after a break, a new one, if no server had the queue meanwhile."""
        if self._writer is None:
            raise StoreError("the queue is closed")
        if self._writer.invalidated and not self.is_sqlite:
            self._writer.close()
            with self._database.explained():
                self._writer = self._take_lock(0)
                with self._writer.begin():
                    openings = self._writer.execute(select(QueueRow.openings)).scalar_one()
            if openings != self._openings:
                self._writer.close()
                self._writer = None
                raise StoreError("another server has taken the queue over")
        return self._writer

    def _take_lock(self, patience: float) -> Connection:
        """Return a new connection that holds the advisory lock, where the database has such locks."""
        end = time.monotonic() + patience
        connection = self._database.engine.connect()
        try:
            while not self.is_sqlite:
                with connection.begin():
                    taken = connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": _ADVISORY_LOCK})
                    if taken.scalar_one():
                        break
                if time.monotonic() >= end:
                    raise StoreBusy("another server has the queue")
                time.sleep(_PAUSE)
        except BaseException:
            connection.close()
            raise
        return connection

    def _open(self) -> None:
        """Make the tables, or check their version; count this opening."""
        with self.writing() as connection:
            if not inspect(connection).has_table(QueueRow.__tablename__):
                QueueBase.metadata.create_all(connection, checkfirst=False)
                connection.execute(insert(QueueRow).values(id=1, version=VERSION, openings=0))
            version = connection.execute(select(QueueRow.version)).scalar()
            if version != VERSION:
                raise StoreError(f"the queue has version {version} of its tables; this software needs {VERSION}")
            connection.execute(update(QueueRow).values(openings=QueueRow.openings + 1))
            self._openings = connection.execute(select(QueueRow.openings)).scalar_one()


def _folder_and_url(target: str | Path) -> tuple[Path | None, str]:
    if "://" in str(target):
        url = make_url(str(target))
        if url.get_backend_name() != "postgresql":
            raise InputError("a queue is a folder, or a database postgresql://…")
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        return None, url.render_as_string(hide_password=False)
    folder = Path(target)
    _prepare(folder)
    return folder, f"sqlite:///{folder.resolve() / _FILE}"


def _prepare(folder: Path) -> None:
    """Make the folder and the database's file, for their owner only. Raises InputError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / _FILE).exists():
            raise InputError(f"{folder} is the folder of something else: a queue needs one of its own")
        folder.chmod(0o700)
        # SQLite gives its other files the mode of this one.
        os.close(os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise InputError(f"the queue cannot be kept in {folder}: {error.strerror}") from None


@contextmanager
def _locked(folder: Path, patience: float) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(folder / "lock", patience))
        except StoreBusy:
            raise StoreBusy(f"another server has the queue {folder}") from None
        yield
