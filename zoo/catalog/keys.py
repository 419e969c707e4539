"""Keys of clients, and what they use: queries and changes on their two tables, over the caller's connection."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, insert, select, update

from zoo.catalog import schema as t
from zoo.errors import NameTaken, NotFound
from zoo.manifest import canonical_json
from zoo.records import ClientKey, KeyUsage


def all_keys(connection: Connection) -> list[ClientKey]:
    """Return all keys, revoked ones too, in order of creation."""
    return [_key(row) for row in connection.execute(select(t.ClientKeyRow).order_by(t.ClientKeyRow.id))]


def usage_since(connection: Connection, day: str) -> list[KeyUsage]:
    """Return what keys have used from a day on (UTC, as 2026-01-31), in order of days and names."""
    rows = select(t.KeyUsageRow).where(t.KeyUsageRow.day >= day).order_by(t.KeyUsageRow.day, t.KeyUsageRow.name)
    return [
        KeyUsage(row.name, row.day, row.requests, row.prompt_tokens, row.generated_tokens)
        for row in connection.execute(rows)
    ]


def put_key(connection: Connection, key: ClientKey) -> None:
    """Add a key. Raises NameTaken if a valid one has its name."""
    if any(each.name == key.name and each.revoked is None for each in all_keys(connection)):
        raise NameTaken(f"there is a key {key.name!r}: revoke it first")
    connection.execute(
        insert(t.ClientKeyRow).values(
            name=key.name,
            principal=key.principal,
            models=canonical_json(key.models),
            requests_per_minute=key.requests_per_minute,
            tokens_per_day=key.tokens_per_day,
            priority=key.priority,
            created=key.created.replace(tzinfo=None),
        )
    )


def revoke_key(connection: Connection, name: str) -> None:
    """End a valid key. Raises NotFound."""
    valid = (t.ClientKeyRow.name == name) & t.ClientKeyRow.revoked.is_(None)
    now = datetime.now(UTC).replace(tzinfo=None)
    if not connection.execute(update(t.ClientKeyRow).where(valid).values(revoked=now)).rowcount:
        raise NotFound(f"there is no valid key {name[:200]!r}")


def add_usage(connection: Connection, used: Iterable[KeyUsage]) -> None:
    """Add what was used to what is recorded."""
    rows = t.KeyUsageRow
    for each in used:
        added = {
            "requests": rows.requests + each.requests,
            "prompt_tokens": rows.prompt_tokens + each.prompt_tokens,
            "generated_tokens": rows.generated_tokens + each.generated_tokens,
        }
        one = (rows.name == each.name) & (rows.day == each.day)
        if not connection.execute(update(rows).where(one).values(added)).rowcount:
            values = (each.requests, each.prompt_tokens, each.generated_tokens)
            connection.execute(
                insert(rows).values(name=each.name, day=each.day, **dict(zip(added, values, strict=True)))
            )


def _key(row: Any) -> ClientKey:
    return ClientKey(
        name=row.name,
        principal=row.principal,
        models=tuple(json.loads(row.models)),
        requests_per_minute=row.requests_per_minute,
        tokens_per_day=row.tokens_per_day,
        priority=row.priority,
        created=row.created.replace(tzinfo=UTC),
        revoked=None if row.revoked is None else row.revoked.replace(tzinfo=UTC),
    )
