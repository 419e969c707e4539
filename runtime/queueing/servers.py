"""The servers of one queue (QL-02), each with a lease by the database's clock. Only PostgreSQL has several.

    join -> renew ... -> leave            bury: a lease that is over ends the server's part

A server's number is its fencing token. Each of its transactions locks its row (`holds`), and so `bury` waits for those
under way and none begins afterwards: what a dead server had can be given away, even if it was only slow (leases as
in Gray and Cheriton, SOSP 1989, and Chubby, OSDI 2006).
"""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import ColumnElement, Connection, Table, bindparam, delete, insert, literal_column, select, update

from runtime.queueing.schema import QueueRow, ServerRow

_servers = cast(Table, ServerRow.__table__)
#: Made once, since each transaction of a server runs it.
_HOLDS = select(_servers.c.id).where(_servers.c.id == bindparam("server")).with_for_update(read=True, key_share=True)


def join(connection: Connection, lease_us: int) -> int:
    """Begin a server's part with a lease of so many microseconds; return its number."""
    connection.execute(update(QueueRow).values(openings=QueueRow.openings + 1))
    number = connection.execute(select(QueueRow.openings)).scalar_one()
    connection.execute(insert(_servers).values(id=number, expires=_now(connection) + lease_us))
    return number


def renew(connection: Connection, number: int, lease_us: int) -> bool:
    """Let a server's lease begin anew. Return False if it was buried."""
    query = update(_servers).where(_servers.c.id == number).values(expires=_now(connection) + lease_us)
    return connection.execute(query).rowcount == 1


def holds(connection: Connection, number: int) -> bool:
    """Return whether a server takes part, and let no server bury it before this transaction ends."""
    return connection.execute(_HOLDS, {"server": number}).first() is not None


def bury(connection: Connection, spared: int) -> list[int]:
    """End the part of servers with leases that are over, but for those that write now; return their numbers.

    Args:
        spared: The server that buries: it lives, even if it was too slow to renew its lease.
    """
    late = (_servers.c.expires < _now(connection)) & (_servers.c.id != spared)
    over = select(_servers.c.id).where(late).with_for_update(skip_locked=True)
    dead = list(connection.execute(over).scalars())
    if dead:
        connection.execute(delete(_servers).where(_servers.c.id.in_(dead)))
    return dead


def leave(connection: Connection, number: int) -> None:
    """End a server's part."""
    connection.execute(delete(_servers).where(_servers.c.id == number))


def bury_all(connection: Connection) -> None:
    """End the part of all servers, for one that has the queue to itself."""
    connection.execute(delete(_servers))


def orphaned(owner: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that no server has a row."""
    return owner.is_(None) | owner.not_in(select(_servers.c.id))


def _now(connection: Connection) -> ColumnElement[int]:
    """Return the time of the database in microseconds: one clock for all servers."""
    if connection.dialect.name == "sqlite":
        return literal_column("CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)")
    return literal_column("CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)")
