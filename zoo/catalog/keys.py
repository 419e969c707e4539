"""Keys of clients, what they use, and prices: queries and changes on their tables, over the caller's connection."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, case, delete, func, insert, select, update

from zoo.catalog import schema as t
from zoo.errors import NameTaken, NotFound
from zoo.manifest import canonical_json
from zoo.money import MOST_COST, ModelPrice
from zoo.records import ClientKey, KeyUsage

#: The values of half of 64 bits.
_HALF = 1 << 32


def all_keys(connection: Connection) -> list[ClientKey]:
    """Return all keys, revoked ones too, in order of creation."""
    return [_key(row) for row in connection.execute(select(t.ClientKeyRow).order_by(t.ClientKeyRow.id))]


def usage_since(connection: Connection, day: str) -> list[KeyUsage]:
    """Return what keys have used from a day on (UTC, as 2026-01-31), in order of days, names and models."""
    rows = t.ModelUsageRow
    ordered = select(rows).where(rows.day >= day).order_by(rows.day, rows.name, rows.model)
    return [
        KeyUsage(
            row.name, row.day, row.requests, row.prompt_tokens, row.generated_tokens, row.model, row.answers, row.cost,
            row.cached_tokens,
        )
        for row in connection.execute(ordered)
    ]  # fmt: skip


def usage_of_day(connection: Connection, day: str) -> list[KeyUsage]:
    """Return what each key has used on a day, of all models together."""
    return _summed(connection, day, t.ModelUsageRow.day == day)


def usage_of_month(connection: Connection, month: str) -> list[KeyUsage]:
    """Return what each valid key with bounds for months has used in a month (2026-01), of all models together."""
    keys, rows = t.ClientKeyRow, t.ModelUsageRow
    bounded = keys.tokens_per_month.is_not(None) | keys.money_per_month.is_not(None)
    names = select(keys.name).where(bounded, keys.revoked.is_(None))
    # As dates, which every collation orders alike.
    days = (rows.day >= f"{month}-01") & (rows.day <= f"{month}-31")
    return _summed(connection, month, rows.name.in_(names) & days)


def _summed(connection: Connection, period: str, condition: ColumnElement[bool]) -> list[KeyUsage]:
    rows = t.ModelUsageRow
    # Sums of costs may take more than 64 bits: each half of a cost is added up for itself.
    tokens = (rows.prompt_tokens, rows.generated_tokens, rows.cached_tokens)
    counted = (rows.requests, *tokens, rows.answers, rows.cost // _HALF, rows.cost % _HALF)
    query = select(rows.name, *(func.sum(each) for each in counted)).where(condition).group_by(rows.name)
    found: list[KeyUsage] = []
    for name, *sums in connection.execute(query):
        requests, prompt, generated, cached, answers, high, low = map(int, sums)
        cost = high * _HALF + low
        found.append(KeyUsage(name, period, requests, prompt, generated, "", answers, cost, cached))
    return found


def all_prices(connection: Connection) -> list[ModelPrice]:
    """Return all prices, in order of the models' names."""
    rows = connection.execute(select(t.PriceRow).order_by(t.PriceRow.model))
    return [ModelPrice(row.model, row.prompt, row.generated, row.cached) for row in rows]


def put_price(connection: Connection, price: ModelPrice) -> None:
    """Record a price in place of the one before."""
    connection.execute(delete(t.PriceRow).where(t.PriceRow.model == price.model))
    values = {"model": price.model, "prompt": price.prompt, "generated": price.generated, "cached": price.cached}
    connection.execute(insert(t.PriceRow).values(**values))


def drop_price(connection: Connection, model: str) -> None:
    """Remove a model's price, or that of models without one (""). Raises NotFound."""
    if not connection.execute(delete(t.PriceRow).where(t.PriceRow.model == model)).rowcount:
        raise NotFound(f"{model[:200]!r} has no price of its own" if model else "there is no price for the rest")


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
            money_per_day=key.money_per_day,
            tokens_per_month=key.tokens_per_month,
            money_per_month=key.money_per_month,
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
    rows = t.ModelUsageRow
    for each in used:
        cost = min(each.cost, MOST_COST)
        added = {
            "requests": rows.requests + each.requests,
            "prompt_tokens": rows.prompt_tokens + each.prompt_tokens,
            "generated_tokens": rows.generated_tokens + each.generated_tokens,
            "answers": rows.answers + each.answers,
            "cached_tokens": rows.cached_tokens + each.cached_tokens,
            "cost": case((rows.cost > MOST_COST - cost, MOST_COST), else_=rows.cost + cost),
        }
        one = (rows.name == each.name) & (rows.day == each.day) & (rows.model == each.model)
        if not connection.execute(update(rows).where(one).values(added)).rowcount:
            tokens = (each.prompt_tokens, each.generated_tokens)
            values = (each.requests, *tokens, each.answers, each.cached_tokens, cost)
            first = dict(zip(added, values, strict=True))
            connection.execute(insert(rows).values(name=each.name, day=each.day, model=each.model, **first))


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
        money_per_day=row.money_per_day,
        tokens_per_month=row.tokens_per_month,
        money_per_month=row.money_per_month,
    )
