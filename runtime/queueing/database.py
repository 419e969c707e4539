"""Open the durable queue: a folder with an SQLite database, for one server, or a PostgreSQL database for several.

SQLite: the folder is locked (`flock`) and readable by its owner only.

PostgreSQL: each server has a number and a lease (`servers`), which a thread renews. Every write is made in a
transaction that first checks that the server still has its lease, and keeps it from losing that meanwhile; one in which
the server is silent for the time of a lease is ended by the database. A server that has lost its lease writes nothing
more until `rejoin`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url

from runtime.config import QUEUE_LEASE_SECONDS
from runtime.queueing import servers
from runtime.queueing.migrations import migrate
from zoo.database import Database
from zoo.errors import InputError, StoreBusy, StoreError
from zoo.objects.locks import exclusive

_log = logging.getLogger(__name__)

#: Seconds that a server waits for another one to let the queue's folder go: its death may take a moment.
PATIENCE = 10.0
#: How many times a lease is renewed in its time.
_RENEWALS = 4
#: Advisory lock of servers that open the queue: an arbitrary number ("zooqueue" in ASCII). Version 1 of the tables was
#: for one server, which held it for its life.
_ADVISORY_LOCK = 0x7A6F6F7175657565
_FILE = "queue.sqlite"


class LeaseLost(StoreError):
    """This server's lease was over, and what it had was given to other servers."""


class QueueDatabase:
    """The database of the queue, in which this server takes part until `close`.

    Args:
        target: A folder, or a URL `postgresql://…`.
        patience: Seconds to wait for another server to let the folder, or tables of version 1, go.
        lease: Seconds without a renewal after which other servers take over what this one has (PostgreSQL).

    Attributes:
        folder: The folder; None for PostgreSQL.
        server: This server's number, the owner of its rows.

    Raises:
        InputError: The target is neither, or a folder of other things.
        StoreBusy: Another server has the folder, or one of an older version the database.
        StoreError: The database cannot be used, or its tables are of a newer version than this software.
    """

    def __init__(self, target: str | Path, patience: float = PATIENCE, lease: float = QUEUE_LEASE_SECONDS) -> None:
        self._stack = ExitStack()
        self._writes = threading.Lock()
        self._writer: Connection | None = None
        self._heart: _Heart | None = None
        self._lost = False
        self.lease = lease
        self.server = 0
        try:
            self.folder, url = _folder_and_url(target)
            if self.folder is not None:
                self._stack.enter_context(_locked(self.folder, patience))
            # A server that is stopped in a transaction keeps its row locked: no server could bury it without a limit.
            self._database = Database(url, "queue", _ADVISORY_LOCK, idle=lease)
            self._stack.callback(self._database.close)
            with self._database.explained():
                self._writer = self._database.engine.connect()
            self._open(patience)
            if self.shared:
                self._heart = _Heart(self)
        except BaseException:
            self.close()
            raise

    @property
    def is_sqlite(self) -> bool:
        return self._database.is_sqlite

    @property
    def shared(self) -> bool:
        """Whether other servers may take part."""
        return not self.is_sqlite

    @property
    def has_lost_lease(self) -> bool:
        """Whether this server has lost its lease."""
        return self._lost

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a transaction on one consistent snapshot. Any thread; waits for no writer."""
        with self._database.reading() as connection:
            yield connection

    @contextmanager
    def writing(self, synced: bool = True) -> Iterator[Connection]:
        """Open a writing transaction; one at a time in this process. Any thread. Not `synced`: see
        `Database.writing_on`.

        Raises StoreError: LeaseLost if this server has lost its lease.
        """
        with self._writes, self._database.writing_on(self._held(), synced) as connection:
            self._check_lease(connection)
            yield connection

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Translate database errors into the store's errors."""
        with self._database.explained():
            yield

    def renew(self) -> None:
        """Let the lease begin anew. Blocks. Raises StoreError."""
        with self._database.explained(), self._database.engine.begin() as connection:
            if not servers.renew(connection, self.server, self._lease_us):
                self._lost = True

    def rejoin(self) -> None:
        """Take part again, as a new server, after a lost lease. What the old one had must not run here any more."""
        with self._writes, self._database.writing_on(self._held()) as connection:
            self.server = servers.join(connection, self._lease_us)
        self._lost = False

    def close(self) -> None:
        """End this server's part. May be called again."""
        if self._heart is not None:
            self._heart.stop()
            self._heart = None
        with self._writes:
            if self._writer is not None:
                with suppress(StoreError), self._database.writing_on(self._held()) as connection:
                    servers.leave(connection, self.server)
                self._writer.close()
                self._writer = None
            self._stack.close()

    @property
    def _lease_us(self) -> int:
        return round(self.lease * 1e6)

    def _held(self) -> Connection:
        """Return the connection of all writes; after a break, a new one."""
        if self._writer is None:
            raise StoreError("the queue is closed")
        if self._writer.invalidated:
            self._writer.close()
            with self._database.explained():
                self._writer = self._database.engine.connect()
        return self._writer

    def _check_lease(self, connection: Connection) -> None:
        if not self.shared:
            return
        if self._lost or not servers.holds(connection, self.server):
            self._lost = True
            raise LeaseLost("this server's lease of the queue was over, and other servers have taken its requests over")

    def _open(self, patience: float) -> None:
        """Make or migrate the tables, and join."""
        with self._writes, self._database.writing_on(self._held()) as connection:
            if self.shared:
                self._lock_opening(connection, patience)
            migrate(connection)
            if not self.shared:
                servers.bury_all(connection)
            self.server = servers.join(connection, self._lease_us)

    def _lock_opening(self, connection: Connection, patience: float) -> None:
        """Wait for other servers that open the queue, and for one of version 1, which holds this lock for its life."""
        connection.execute(text(f"SET LOCAL lock_timeout = {max(1, round(patience * 1000))}"))
        try:
            with self._database.explained():
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        except StoreBusy:
            raise StoreBusy("another server has the queue, one of an older version") from None


class _Heart:
    """The thread that renews a server's lease."""

    def __init__(self, database: QueueDatabase) -> None:
        self._database = database
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zoo-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._database.lease / _RENEWALS):
            try:
                self._database.renew()
            except StoreError as error:
                _log.warning("the lease of the queue could not be renewed: %s", error)


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
