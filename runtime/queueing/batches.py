"""Batches in the queue's database. Their lines are requests (`requests`) with the batch's id and a line number.

Each function works in the transaction that it is given. A status changes only from the statuses that a caller names, so
that two events (the last line ends, the client cancels) cannot both take effect. A principal sees its own batches only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args

import msgspec
from sqlalchemy import Connection, RowMapping, Table, bindparam, delete, func, or_, select, update

from runtime.queueing import requests
from runtime.queueing.records import DurableRequest, State
from runtime.queueing.schema import BatchRow, RequestRow
from runtime.queueing.servers import orphaned

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]

_STATES = get_args(State)
#: Statuses of a batch that something is still to be done for.
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")

_batches, _requests = cast(Table, BatchRow.__table__), cast(Table, RequestRow.__table__)

# Made once, since each line runs it when it begins (as in `requests`).
_RUNNING = select(_batches.c.id).where(
    _batches.c.id.in_(bindparam("ids", expanding=True)),
    or_(_batches.c.status == "validating", _batches.c.status == "in_progress"),
)
_HOLD_RUNNING = _RUNNING.order_by(_batches.c.id).with_for_update(read=True)


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch.

    Fields:
        window: The completion window as it was given.
        created, deadline, ended: Nanoseconds of the wall clock.
        times: When it came to each status, in nanoseconds of the wall clock.
        errors: Why its input file was refused, as OpenAI's documents.
        total, completed, failed: Lines; the latter two are final once it has ended.
        becomes: The status that it ends with, once it is `finalizing`.
        owner: Number of the server that runs it; None for no server.
    """

    id: str
    principal: str
    endpoint: str
    input_file: str
    window: str
    created: int
    deadline: int
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    times: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file: str | None = None
    error_file: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    becomes: Status = "completed"
    owner: int | None = None
    ended: int | None = None


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """A line of a batch: its request's id and state, and once it has ended the answer's HTTP status and JSON body."""

    line: int
    request: str
    state: State
    status: int | None
    document: bytes | None


def put(connection: Connection, batch: StoredBatch) -> bool:
    """Add a batch. Return False, with nothing changed, if there is one with its id."""
    from sqlalchemy.dialects import postgresql, sqlite  # here, since most servers keep no batches

    make = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    row = _row({each.name: getattr(batch, each.name) for each in fields(batch)})
    query = make(_batches).values(row).on_conflict_do_nothing().returning(_batches.c.id)
    return connection.execute(query).first() is not None


def get(connection: Connection, batch: str, principal: str | None = None) -> StoredBatch | None:
    """Return a batch: one of a principal's, or any for None."""
    own = _batches.c.id == batch
    if principal is not None:
        own &= _batches.c.principal == principal
    row = connection.execute(select(_batches).where(own)).mappings().first()
    return None if row is None else _batch(row)


def listed(connection: Connection, principal: str, limit: int, after: str | None = None) -> list[StoredBatch]:
    """Return a principal's batches, the latest first: at most `limit`, those behind the batch `after`."""
    query = select(_batches).where(_batches.c.principal == principal)
    if after is not None:
        last = get(connection, after, principal)
        if last is None:
            return []
        query = query.where(
            (_batches.c.created < last.created) | ((_batches.c.created == last.created) & (_batches.c.id > after))
        )
    query = query.order_by(_batches.c.created.desc(), _batches.c.id).limit(limit)
    return [_batch(row) for row in connection.execute(query).mappings()]


def unended(connection: Connection) -> list[StoredBatch]:
    """Return all batches that have not ended, the oldest first."""
    query = select(_batches).where(_batches.c.status.in_(OPEN)).order_by(_batches.c.created, _batches.c.id)
    return [_batch(row) for row in connection.execute(query).mappings()]


def adopt(connection: Connection, owner: int) -> list[StoredBatch]:
    """Give a server the batches that have not ended and that no server has; return them, the oldest first."""
    free = _batches.c.status.in_(OPEN) & orphaned(_batches.c.owner)
    query = select(_batches).where(free).order_by(_batches.c.created, _batches.c.id)
    query = query.with_for_update(skip_locked=True, of=_batches)
    found = [replace(_batch(row), owner=owner) for row in connection.execute(query).mappings()]
    for batch in found:
        connection.execute(update(_batches).where(_batches.c.id == batch.id).values(owner=owner))
    return found


def leave(connection: Connection, owner: int) -> None:
    """Let any server take over the batches of one that stops."""
    connection.execute(update(_batches).where(_batches.c.owner == owner).values(owner=None))


def running(connection: Connection, ids: Collection[str], hold: bool = False) -> set[str]:
    """Return those of some batches that may run lines. `hold`: their status does not change before this transaction is
    over.
    """
    query = _HOLD_RUNNING if hold else _RUNNING
    return set(connection.execute(query, {"ids": list(ids)}).scalars()) if ids else set()


def cancelling(connection: Connection, owner: int) -> list[str]:
    """Return a server's batches that are to be cancelled."""
    query = select(_batches.c.id).where(_batches.c.status == "cancelling", _batches.c.owner == owner)
    return list(connection.execute(query).scalars())


def change(connection: Connection, batch: str, since: Collection[Status], now: int, **values: Any) -> bool:
    """Change fields of a batch if its status is one of `since`; return whether it was. A new status is timed `now`."""
    query = select(_batches).where(_batches.c.id == batch).with_for_update()
    row = connection.execute(query).mappings().first()
    if row is None or row["status"] not in since:
        return False
    status = values.get("status")
    if status is not None:
        values["times"] = _batch(row).times | {status: now}
        if status not in OPEN:
            values["ended"] = now
    connection.execute(update(_batches).where(_batches.c.id == batch).values(_row(values)))
    return True


def add_lines(connection: Connection, lines: Sequence[DurableRequest]) -> None:
    """Add lines of a batch as queued requests; those that exist stay as they are."""
    requests.put(connection, lines)


def answers(connection: Connection, batch: str, behind: int, limit: int) -> list[LineAnswer]:
    """Return lines in order: at most `limit` behind line `behind`."""
    columns = select(_requests.c.line, _requests.c.id, _requests.c.state, _requests.c.status, _requests.c.answer)
    query = columns.where((_requests.c.batch == batch) & (_requests.c.line > behind)).order_by(_requests.c.line)
    return [
        LineAnswer(row.line, row.id, row.state, row.status, requests.unpacked(row.answer))
        for row in connection.execute(query.limit(limit))
    ]


def line_counts(connection: Connection, batch: str) -> dict[State, int]:
    """Return the number of lines of a batch by state."""
    query = select(_requests.c.state, func.count()).where(_requests.c.state.in_(_STATES), _requests.c.batch == batch)
    return dict(connection.execute(query.group_by(_requests.c.state)).tuples().all())


def with_counts(connection: Connection, batch: StoredBatch) -> StoredBatch:
    """Return a batch with the counts of its lines as of now, if it has not ended."""
    if batch.status not in OPEN:
        return batch
    counts = line_counts(connection, batch.id)
    return replace(batch, completed=counts.get("done", 0), failed=counts.get("failed", 0) + counts.get("dead", 0))


def ended_with_lines(connection: Connection) -> list[str]:
    """Return the batches that have ended and still have lines."""
    query = select(_batches.c.id).where(_batches.c.ended.is_not(None))
    return list(
        connection.execute(
            query.where(select(_requests.c.id).where(_requests.c.batch == _batches.c.id).exists())
        ).scalars()
    )


def drop_lines(connection: Connection, batch: str, limit: int) -> int:
    """Remove at most `limit` lines of a batch; return how many."""
    lines = select(_requests.c.id).where(_requests.c.batch == batch).limit(limit)
    return connection.execute(delete(_requests).where(_requests.c.id.in_(lines))).rowcount


def remove(connection: Connection, batches: Iterable[str]) -> None:
    """Remove batches without lines."""
    connection.execute(delete(_batches).where(_batches.c.id.in_(list(batches))))


def ended_before(connection: Connection, time: int, limit: int = 100) -> list[str]:
    """Return at most `limit` batches that ended before a time."""
    return list(connection.execute(select(_batches.c.id).where(_batches.c.ended < time).limit(limit)).scalars())


_DOCUMENTS: dict[str, Any] = {
    "metadata": dict[str, str] | None,
    "times": dict[str, int],
    "errors": list[dict[str, Any]],
}


def _row(values: dict[str, Any]) -> dict[str, Any]:
    documents = {name: msgspec.json.encode(values[name]).decode() for name in _DOCUMENTS if name in values}
    return values | documents


def _batch(row: RowMapping) -> StoredBatch:
    documents = {name: msgspec.json.decode(row[name], type=kind) for name, kind in _DOCUMENTS.items()}
    return StoredBatch(**{**row, **documents})
