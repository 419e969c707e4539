"""The queries of the durable queue. Each works in the transaction that it is given (`QueueDatabase`, `Journal.write`).

    put (queued | running) -> claim -> append ... -> finish -> expire
                                  \\-> release -> claim ...

A request ends once: `finish` of one that has ended changes nothing. Events of ended requests are dropped with the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from typing import cast

import zstandard
from sqlalchemy import Connection, RowMapping, Table, delete, func, insert, null, select, update

from runtime.queueing.records import ENDED, DurableRequest, FileRange, State, StoredAnswer
from runtime.queueing.schema import EventRow, RequestRow

#: Starts without progress after which a request is given up.
MOST_ATTEMPTS = 3

_requests, _events = cast(Table, RequestRow.__table__), cast(Table, EventRow.__table__)
_COLUMNS = [column for column in _requests.columns if column.name not in ("progress", "answer", "stream")]
#: The same without bodies, which may be large.
_HEAD = [null().label("body") if column.name == "body" else column for column in _COLUMNS]
_UNENDED: tuple[State, ...] = ("queued", "running")


def put(connection: Connection, requests: Iterable[DurableRequest]) -> None:
    """Add requests; an id or a key that is there already is left as it is."""
    # Imported here, since most servers keep no durable requests.
    from sqlalchemy.dialects import postgresql, sqlite

    rows = [_row(request) for request in requests]
    if rows:
        make = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
        connection.execute(make(_requests).on_conflict_do_nothing(), rows)


def get(connection: Connection, request: str) -> DurableRequest | None:
    """Return a request by its id."""
    row = connection.execute(select(*_COLUMNS).where(_requests.c.id == request)).mappings().first()
    return None if row is None else _request(row)


def by_key(connection: Connection, principal: str, key: str) -> DurableRequest | None:
    """Return a principal's request by the digest of its key."""
    own = (_requests.c.principal == principal) & (_requests.c.key == key)
    row = connection.execute(select(*_COLUMNS).where(own)).mappings().first()
    return None if row is None else _request(row)


def answer(connection: Connection, request: str) -> StoredAnswer | None:
    """Return the answer of a request that has ended, else None."""
    columns = select(_requests.c.status, _requests.c.answer, _requests.c.stream)
    row = connection.execute(columns.where(_requests.c.id == request)).first()
    if row is None or row.status is None:
        return None
    return StoredAnswer(row.status, unpacked(row.answer) or b"", unpacked(row.stream))


def unfinished(connection: Connection, batches: bool | None = None) -> list[DurableRequest]:
    """Return queued and running requests without their bodies, the first to run first.

    Args:
        batches: Lines of batches only, all but those, or both (None).
    """
    query = select(*_HEAD).where(_requests.c.state.in_(_UNENDED))
    if batches is not None:
        query = query.where(_requests.c.batch.is_not(None) if batches else _requests.c.batch.is_(None))
    query = query.order_by(_requests.c.priority, _requests.c.created, _requests.c.line, _requests.c.id)
    return [_request(row) for row in connection.execute(query).mappings()]


def recover(connection: Connection, given: StoredAnswer, now: int) -> list[str]:
    """Queue the requests that a server left running when it died; return the ids of those that are given up instead.

    A request is given up, with the answer `given`, once `MOST_ATTEMPTS` servers died with it in a row before it made
    any progress.
    """
    further = select(_events.c.ordinal).where(
        _events.c.request == _requests.c.id, _events.c.ordinal > _requests.c.progress
    )
    progressed = (_requests.c.state == "running") & further.exists()
    connection.execute(update(_requests).where(progressed).values(attempts=0))
    gone = (_requests.c.state == "running") & (_requests.c.attempts >= MOST_ATTEMPTS)
    dead = list(connection.execute(select(_requests.c.id).where(gone)).scalars())
    for request in dead:
        finish(connection, request, "dead", given, now)
    connection.execute(update(_requests).where(_requests.c.state == "running").values(state="queued"))
    return dead


def claim(
    connection: Connection,
    *,
    ids: Collection[str] | None = None,
    batch: str | None = None,
    limit: int | None = None,
) -> list[DurableRequest]:
    """Return queued requests, the first to run first, which are running from now on, one attempt more.

    Args:
        ids: Only these.
        batch: Only lines of this batch.
        limit: At most so many.
    """
    query = select(*_COLUMNS).where(_requests.c.state == "queued")
    if ids is not None:
        query = query.where(_requests.c.id.in_(ids))
    if batch is not None:
        query = query.where(_requests.c.batch == batch)
    query = query.order_by(_requests.c.priority, _requests.c.created, _requests.c.line, _requests.c.id).limit(limit)
    claimed = [_request(row) for row in connection.execute(query).mappings()]
    if claimed:
        mine = _requests.c.id.in_([request.id for request in claimed])
        latest = select(func.coalesce(func.max(_events.c.ordinal), -1)).where(_events.c.request == _requests.c.id)
        values = {"state": "running", "attempts": _requests.c.attempts + 1, "progress": latest.scalar_subquery()}
        connection.execute(update(_requests).where(mine).values(values))
    return [replace(request, state="running", attempts=request.attempts + 1) for request in claimed]


def started(connection: Connection, request: str, model: str, version: str) -> None:
    """Record the model that a running request has started on."""
    connection.execute(update(_requests).where(_requests.c.id == request).values(model=model, version=version))


def append(connection: Connection, rows: Sequence[tuple[str, int, bytes]]) -> None:
    """Add events of requests: id, number of the first one, `records.encode_events`. They count as progress."""
    connection.execute(insert(_events), [{"request": i, "ordinal": n, "events": e} for i, n, e in rows])


def events(connection: Connection, request: str) -> list[bytes]:
    """Return the events of a request that has not ended, in order."""
    query = select(_events.c.events).where(_events.c.request == request).order_by(_events.c.ordinal)
    return list(connection.execute(query).scalars())


def finish(connection: Connection, request: str, state: State, given: StoredAnswer, now: int) -> bool:
    """End a request with its answer, and drop its events. Return False, with nothing changed, if it had ended."""
    if state not in ENDED:
        raise ValueError(f"{state} is no end")
    own = (_requests.c.id == request) & _requests.c.state.in_(_UNENDED)
    values = {
        "state": state,
        "ended": now,
        "status": given.status,
        "answer": packed(given.document),
        "stream": packed(given.stream),
    }
    done = connection.execute(update(_requests).where(own).values(values)).rowcount == 1
    if done:
        connection.execute(delete(_events).where(_events.c.request == request))
    return done


def release(connection: Connection, ids: Collection[str] | None = None) -> None:
    """Queue running requests again that the server has put down unharmed: the attempt does not count. None: all."""
    query = update(_requests).where(_requests.c.state == "running")
    if ids is not None:
        query = query.where(_requests.c.id.in_(ids))
    fewer = func.max if connection.dialect.name == "sqlite" else func.greatest
    connection.execute(query.values(state="queued", attempts=fewer(_requests.c.attempts - 1, 0)))


def counts(connection: Connection, batch: str | None = None) -> dict[str, int]:
    """Return the number of requests by state: of one batch, or of all."""
    query = select(_requests.c.state, func.count()).group_by(_requests.c.state)
    if batch is not None:
        query = query.where(_requests.c.batch == batch)
    return {row[0]: row[1] for row in connection.execute(query)}


def expire(connection: Connection, before: int, limit: int = 1000) -> int:
    """Remove at most `limit` requests that ended before a time, but for lines of batches; return how many."""
    old = select(_requests.c.id).where(_requests.c.ended < before, _requests.c.batch.is_(None)).limit(limit)
    return connection.execute(delete(_requests).where(_requests.c.id.in_(old))).rowcount


def _row(request: DurableRequest) -> dict[str, object]:
    row = {each.name: getattr(request, each.name) for each in fields(request)}
    source: FileRange | None = row.pop("source")
    file, offset, length = (None,) * 3 if source is None else (source.file, source.offset, source.length)
    return row | {"file": file, "offset": offset, "length": length, "progress": -1}


def _request(row: RowMapping) -> DurableRequest:
    values = dict(row)
    file, offset, length = values.pop("file"), values.pop("offset"), values.pop("length")
    return DurableRequest(**values, source=None if file is None else FileRange(file, offset, length))


def packed(data: bytes | None) -> bytes | None:
    """Return an answer as it is stored."""
    return None if data is None else zstandard.compress(data, 3)


def unpacked(data: bytes | None) -> bytes | None:
    """Return an answer as it was given."""
    return None if data is None else zstandard.decompress(data)
