"""What requests of clients have used, kept in the queue until the catalogue has counted it (a transactional outbox).

A row is written in the transaction that ends its request (`requests.finish`), under a random id: the ids of requests
with a key come again after their retention. `runtime.server.keys.outbox` adds rows to the catalogue once each, and
drops them then. Each function works in the transaction that it is given.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import cast

from sqlalchemy import Connection, Table, delete, func, insert, select

from runtime.queueing.schema import QueueRow, UsageRow

_usage = cast(Table, UsageRow.__table__)
#: Bytes of a random name.
_BYTES = 16
#: The values of half of 64 bits.
_HALF = 1 << 32


def random_name() -> str:
    """Return a name that no other one equals."""
    return secrets.token_hex(_BYTES)


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """What one ended request has used.

    Fields:
        principal: Digest of the client's key.
        model: Full name of the model that was asked for.
        day: On which it ended (UTC, as 2026-01-31).
        cached_tokens: Those of the prompt tokens that were not computed.
        cost: What the tokens cost when it ended (`zoo.money`), at most 64 bits.
        id: Random (`random_name`).
    """

    principal: str
    model: str
    day: str
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    cost: int
    id: str


_FIELDS = tuple(each.name for each in fields(RequestUsage))
_PUT = insert(_usage)


def queue_name(connection: Connection) -> str:
    """Return the random name of the queue."""
    return connection.execute(select(QueueRow.name)).scalar_one()


def put(connection: Connection, used: RequestUsage) -> None:
    """Keep usage until it is dropped."""
    connection.execute(_PUT, {name: getattr(used, name) for name in _FIELDS})


def principals(connection: Connection) -> list[str]:
    """Return the principals of which usage is kept."""
    return list(connection.execute(select(_usage.c.principal).distinct()).scalars())


def count(connection: Connection) -> int:
    """Return the number of requests of which usage is kept."""
    return connection.execute(select(func.count()).select_from(_usage)).scalar_one()


def kept(connection: Connection, principals: Collection[str], limit: int) -> list[RequestUsage]:
    """Return kept usage of some principals: at most `limit` rows."""
    query = select(_usage).where(_usage.c.principal.in_(principals)).limit(limit)
    return [RequestUsage(**row) for row in connection.execute(query).mappings()]


def sums(connection: Connection, own: str) -> list[RequestUsage]:
    """Return what is kept under ids that do not begin with `own`, summed up by principal and day; ids and models of the
    sums are "".
    """
    # Sums of costs may take more than 64 bits: each half of a cost is added up for itself.
    tokens = (_usage.c.prompt_tokens, _usage.c.generated_tokens, _usage.c.cached_tokens)
    counted = (*tokens, _usage.c.cost // _HALF, _usage.c.cost % _HALF)
    places = (_usage.c.principal, _usage.c.day)
    query = select(*places, *(func.sum(each) for each in counted)).group_by(*places)
    query = query.where(func.substr(_usage.c.id, 1, len(own)) != own)
    found: list[RequestUsage] = []
    for principal, day, *numbers in connection.execute(query):
        prompt, generated, cached, high, low = map(int, numbers)
        found.append(RequestUsage(principal, "", day, prompt, generated, cached, high * _HALF + low, ""))
    return found


def present(connection: Connection, ids: Collection[str]) -> set[str]:
    """Return those ids of which usage is kept."""
    return set(connection.execute(select(_usage.c.id).where(_usage.c.id.in_(ids))).scalars()) if ids else set()


def drop(connection: Connection, ids: Collection[str]) -> None:
    """Drop usage that the catalogue has counted; rows that another server drops now are left to it."""
    mine = select(_usage.c.id).where(_usage.c.id.in_(ids)).order_by(_usage.c.id).with_for_update(skip_locked=True)
    found = list(connection.execute(mine).scalars())
    connection.execute(delete(_usage).where(_usage.c.id.in_(found)))
