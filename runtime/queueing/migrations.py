"""Forward migrations of the queue's tables: one step per version, all in the transaction that opens the queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlalchemy import Connection, insert, inspect, select, text, update

from runtime.queueing.schema import VERSION, QueueBase, QueueRow, ServerRow, UsageRow
from runtime.queueing.usage import random_name
from zoo.errors import StoreError


def migrate(connection: Connection) -> None:
    """Make the tables, or bring those of an older version to this one. The caller lets no server write meanwhile.

    Raises StoreError for a newer version.
    """
    if not inspect(connection).has_table(QueueRow.__tablename__):
        QueueBase.metadata.create_all(connection, checkfirst=False)
        connection.execute(insert(QueueRow).values(id=1, version=VERSION, openings=0, name=random_name()))
    version = connection.execute(select(QueueRow.version)).scalar_one()
    while version in STEPS:
        STEPS[version](connection)
        version += 1
        connection.execute(update(QueueRow).values(version=version))
    if version != VERSION:
        raise StoreError(f"the queue has version {version} of its tables; this software needs {VERSION}")


def _add_owners(connection: Connection) -> None:
    """Version 1 had one server at a time: nothing that it left has an owner, and all that ran had begun."""
    ServerRow.metadata.tables[ServerRow.__tablename__].create(connection)
    for table in ("queue_requests", "queue_files", "queue_batches"):
        connection.execute(text(f"ALTER TABLE {table} ADD COLUMN owner BIGINT"))
    connection.execute(text("ALTER TABLE queue_requests ADD COLUMN begun BOOLEAN NOT NULL DEFAULT TRUE"))


def _add_usage(connection: Connection) -> None:
    """Version 2 kept no usage: what it had not written to the catalogue when it ended is not known."""
    UsageRow.metadata.tables[UsageRow.__tablename__].create(connection)
    connection.execute(text("ALTER TABLE queue ADD COLUMN name VARCHAR(32) NOT NULL DEFAULT ''"))
    connection.execute(text("UPDATE queue SET name = :name"), {"name": random_name()})


#: What makes the next version of each older one.
STEPS: Mapping[int, Callable[[Connection], None]] = {1: _add_owners, 2: _add_usage}
