"""Open the catalogue's database and bring its tables to the newest version.

This module depends on the version of the tables, not on the tables.
"""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import URL, Connection, inspect, text

from zoo.catalog import migrations
from zoo.database import Database
from zoo.errors import StoreError

#: Advisory lock of the catalogue's writers: an arbitrary number ("blockzoo" in ASCII).
_ADVISORY_LOCK = 0x626C6F636B7A6F6F
#: Serialises migrations: Alembic keeps the running migration in module variables.
_MIGRATING = threading.Lock()


def open_database(url: str | URL) -> Database:
    """Return the catalogue's database for a SQLAlchemy URL without connecting.

    Raises StoreError for a URL or driver that cannot be used.
    """
    return Database(url, "catalogue", _ADVISORY_LOCK)


def migrate(database: Database) -> None:
    """Bring the tables to the newest version. Safe when several processes do it at once.

    Raises:
        StoreError: The catalogue was written by a newer version of this software.
    """
    with database.reading() as connection:
        if _version(connection) == migrations.HEAD:
            return
    with _MIGRATING, database.writing() as connection:
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
