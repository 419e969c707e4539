"""The queries of the durable queue (QL-02). Each works in the transaction that it gets (`QueueDatabase`, `Journal`).

    put (queued | running) -> claim -> begin -> append ... -> finish -> expire
                                  \\-> release -> claim ...

`owner` is the number of the server that has a request (`servers`): the one that accepted it, or that claimed it. What
no living server has is taken over. A request ends once: `finish` of one that has ended changes nothing. Events of ended
requests are dropped with the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import cast

import zstandard
from sqlalchemy import Connection, RowMapping, Table, bindparam, case, delete, func, insert, null, or_, select, update

from runtime.queueing import usage
from runtime.queueing.records import ENDED, DurableRequest, FileRange, State, StoredAnswer
from runtime.queueing.schema import EventRow, RequestRow
from runtime.queueing.servers import orphaned
from runtime.queueing.usage import RequestUsage

#: Attempts without progress after which a request is given up.
MOST_ATTEMPTS = 3

_requests, _events = cast(Table, RequestRow.__table__), cast(Table, EventRow.__table__)
_COLUMNS = [column for column in _requests.columns if column.name not in ("begun", "progress", "answer", "stream")]
#: The same without bodies, which may be large.
_HEAD = [null().label("body") if column.name == "body" else column for column in _COLUMNS]
_UNENDED: tuple[State, ...] = ("queued", "running")
#: The order in which requests run.
_ORDER = (_requests.c.priority, _requests.c.created, _requests.c.line, _requests.c.id)
#: Ids in one statement; databases bound their number.
_AT_ONCE = 500

# The statements of each request and each step. Made once: to make one takes longer than to run it.
_IS_IT = _requests.c.id == bindparam("it")
_EVENTS_OF_IT = _events.c.request == bindparam("it")
#: Each condition by itself: a list of values would be written into the statement at each call.
_IS_UNENDED = or_(*(_requests.c.state == state for state in _UNENDED))
_BEGIN = (
    update(_requests)
    .where(_IS_IT)
    .values(
        begun=True,
        attempts=_requests.c.attempts + 1,
        progress=select(func.coalesce(func.max(_events.c.ordinal), -1)).where(_EVENTS_OF_IT).scalar_subquery(),
    )
)
_UNENDED_OF = select(_requests.c.id).where(_requests.c.id.in_(bindparam("ids", expanding=True)), _IS_UNENDED)
_HOLD_UNENDED_OF = _UNENDED_OF.order_by(_requests.c.id).with_for_update(read=True)
_ADD_EVENTS = insert(_events)
_FINISH = update(_requests).where(_IS_IT, _IS_UNENDED)
_DROP_EVENTS = delete(_events).where(_EVENTS_OF_IT)


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """What another server has written of a request: its state, whether a server has it, and its events so far."""

    state: State
    owner: int | None
    owned: bool
    events: list[bytes]


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
    query = query.order_by(*_ORDER)
    return [_request(row) for row in connection.execute(query).mappings()]


def begun_lines(connection: Connection, batch: str) -> list[DurableRequest]:
    """Return the lines of a batch that any server has begun and that have not ended, in order, without their bodies."""
    lines = (_requests.c.batch == batch) & _requests.c.state.in_(_UNENDED) & (_requests.c.version != "")
    query = select(*_HEAD).where(lines).order_by(_requests.c.line)
    return [_request(row) for row in connection.execute(query).mappings()]


def recover(connection: Connection, given: StoredAnswer, now: int) -> list[str]:
    """Queue the requests that servers left running when they died; return the ids of those that are given up instead.

    A request is given up, with the answer `given`, once `MOST_ATTEMPTS` servers died with it in a row before it made
    any progress. A claim that had not begun is no attempt. Nothing is charged for what is given up.
    """
    lost = (_requests.c.state == "running") & orphaned(_requests.c.owner)
    further = select(_events.c.ordinal).where(
        _events.c.request == _requests.c.id, _events.c.ordinal > _requests.c.progress
    )
    connection.execute(update(_requests).where(lost & further.exists()).values(attempts=0))
    gone = lost & (_requests.c.attempts >= MOST_ATTEMPTS)
    dead = list(connection.execute(select(_requests.c.id).where(gone)).scalars())
    for request in dead:
        finish(connection, request, "dead", given, now)
    connection.execute(update(_requests).where(lost).values(state="queued", owner=None, begun=False))
    return dead


def adopt(connection: Connection, owner: int) -> list[DurableRequest]:
    """Give a server the queued requests that no server has, but for lines of batches; return them without bodies.

    Of one priority those come first that have made progress.
    """
    free = (_requests.c.state == "queued") & _requests.c.batch.is_(None) & orphaned(_requests.c.owner)
    begun = select(_events.c.ordinal).where(_events.c.request == _requests.c.id).exists()
    order = _requests.c.priority, case((begun, 0), else_=1), *_ORDER[1:]
    query = select(*_HEAD).where(free).order_by(*order).with_for_update(skip_locked=True, of=_requests)
    found = [replace(_request(row), owner=owner) for row in connection.execute(query).mappings()]
    for at in range(0, len(found), _AT_ONCE):
        ids = [request.id for request in found[at : at + _AT_ONCE]]
        connection.execute(update(_requests).where(_requests.c.id.in_(ids)).values(owner=owner))
    return found


def claim(
    connection: Connection,
    *,
    owner: int,
    ids: Collection[str] | None = None,
    batch: str | None = None,
    limit: int | None = None,
) -> list[DurableRequest]:
    """Return queued requests that no other server has, the first to run first: `owner` runs them from now on.

    Args:
        ids: Only these.
        batch: Only lines of this batch.
        limit: At most so many.
    """
    free = (_requests.c.state == "queued") & ((_requests.c.owner == owner) | orphaned(_requests.c.owner))
    query = select(*_COLUMNS).where(free)
    if ids is not None:
        query = query.where(_requests.c.id.in_(ids))
    if batch is not None:
        query = query.where(_requests.c.batch == batch)
    query = query.order_by(*_ORDER).limit(limit).with_for_update(skip_locked=True, of=_requests)
    claimed = [_request(row) for row in connection.execute(query).mappings()]
    if claimed:
        mine = _requests.c.id.in_([request.id for request in claimed])
        connection.execute(update(_requests).where(mine).values(state="running", owner=owner, begun=False))
    return [replace(request, state="running", owner=owner) for request in claimed]


def begin(connection: Connection, request: str, model: str, version: str) -> None:
    """Record that a claimed request begins now, on a model: one attempt more."""
    connection.execute(_BEGIN, {"it": request, "model": model, "version": version})


def append(connection: Connection, rows: Sequence[tuple[str, int, bytes]]) -> set[str]:
    """Add events of requests: id, number of the first one, `records.encode_events`. They count as progress.

    Returns the ids of those requests that have not ended. The rest, which other servers have ended, stay as they are.
    """
    going = unended_of(connection, {request for request, _, _ in rows}, hold=True)
    fresh = [{"request": i, "ordinal": n, "events": e} for i, n, e in rows if i in going]
    if fresh:
        connection.execute(_ADD_EVENTS, fresh)
    return going


def events(connection: Connection, request: str) -> list[bytes]:
    """Return the events of a request that has not ended, in order."""
    query = select(_events.c.events).where(_events.c.request == request).order_by(_events.c.ordinal)
    return list(connection.execute(query).scalars())


def finish(
    connection: Connection,
    request: str,
    state: State,
    given: StoredAnswer,
    now: int,
    events: int | None = None,
    used: RequestUsage | None = None,
) -> bool:
    """End a request with its answer, and drop its events. Return False, with nothing changed, if it had ended.

    Args:
        used: What its client is charged for it: kept with the answer, once.
        events: The answer was made from so many of them: where there are more by now, nothing is changed either.
    """
    if state not in ENDED:
        raise ValueError(f"{state} is no end")
    if events is not None:
        # Nothing is appended between the look and the end. A transaction of appends may hold many such rows: one that
        # ends a request of another server should hold no other.
        own = select(_requests.c.id).where(_requests.c.id == request, _IS_UNENDED)
        connection.execute(own.with_for_update(key_share=True))
        more = select(_events.c.ordinal).where(_events.c.request == request, _events.c.ordinal >= events).limit(1)
        if connection.execute(more).first() is not None:
            return False
    values = {
        "it": request,
        "state": state,
        "ended": now,
        "status": given.status,
        "answer": packed(given.document),
        "stream": packed(given.stream),
    }
    done = connection.execute(_FINISH, values).rowcount == 1
    if done:
        connection.execute(_DROP_EVENTS, {"it": request})
        if used is not None:
            usage.put(connection, used)
    return done


def release(connection: Connection, owner: int, ids: Collection[str] | None = None, leave: bool = True) -> None:
    """Queue requests again that a server has put down unharmed: the attempt does not count.

    Args:
        ids: Only these; None: all that the server has.
        leave: Any server may take them over; else the server keeps them.
    """
    mine = (_requests.c.owner == owner) & _requests.c.state.in_(_UNENDED)
    if ids is not None:
        mine &= _requests.c.id.in_(ids)
    begun = (_requests.c.state == "running") & _requests.c.begun & (_requests.c.attempts > 0)
    connection.execute(update(_requests).where(mine & begun).values(attempts=_requests.c.attempts - 1))
    connection.execute(
        update(_requests).where(mine).values(state="queued", begun=False, owner=None if leave else owner)
    )


def watched(connection: Connection, request: str, behind: int) -> RequestProgress | None:
    """Return how a request is getting on, with its events of numbers above `behind`; None if there is no such one."""
    columns = select(_requests.c.state, _requests.c.owner, orphaned(_requests.c.owner).label("orphaned"))
    row = connection.execute(columns.where(_requests.c.id == request)).first()
    if row is None:
        return None
    query = select(_events.c.events).where(_events.c.request == request, _events.c.ordinal > behind)
    events = list(connection.execute(query.order_by(_events.c.ordinal)).scalars())
    return RequestProgress(row.state, row.owner, not row.orphaned, events)


def ended_of(connection: Connection, ids: Collection[str]) -> list[str]:
    """Return those of some requests that have ended."""
    query = select(_requests.c.id).where(_requests.c.id.in_(ids), _requests.c.state.in_(ENDED))
    return list(connection.execute(query).scalars())


def unended_of(connection: Connection, ids: Collection[str], hold: bool = False) -> set[str]:
    """Return those of some requests that are there and have not ended. `hold`: no other transaction ends them before
    this one is over.
    """
    query = _HOLD_UNENDED_OF if hold else _UNENDED_OF
    return set(connection.execute(query, {"ids": list(ids)}).scalars())


def counts(connection: Connection, batch: str | None = None) -> dict[str, int]:
    """Return the number of requests by state: of one batch, or of all."""
    query = select(_requests.c.state, func.count()).group_by(_requests.c.state)
    if batch is not None:
        query = query.where(_requests.c.batch == batch)
    return {row[0]: row[1] for row in connection.execute(query)}


def remove(connection: Connection, request: str) -> None:
    """Remove a request that has ended, with its answer."""
    own = (_requests.c.id == request) & _requests.c.state.in_(ENDED)
    connection.execute(delete(_requests).where(own))


def expire(connection: Connection, before: int, limit: int = 1000) -> int:
    """Remove at most `limit` requests that ended before a time, but for lines of batches; return how many."""
    old = select(_requests.c.id).where(_requests.c.ended < before, _requests.c.batch.is_(None)).limit(limit)
    return connection.execute(delete(_requests).where(_requests.c.id.in_(old))).rowcount


def _row(request: DurableRequest) -> dict[str, object]:
    row = {each.name: getattr(request, each.name) for each in fields(request)}
    source: FileRange | None = row.pop("source")
    file, offset, length = (None,) * 3 if source is None else (source.file, source.offset, source.length)
    return row | {"file": file, "offset": offset, "length": length, "progress": -1, "begun": request.attempts > 0}


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
