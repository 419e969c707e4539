"""Aliases: queries and changes on their two tables, over the caller's connection and transaction.

An alias points to models by their names; `zoo.catalog.writer` checks that these are there, and keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from zoo.catalog import schema as t
from zoo.errors import AmbiguousName, NotFound
from zoo.manifest import canonical_json
from zoo.records import Alias, AliasAct, AliasChange, AliasTarget


def latest_change(connection: Connection) -> int:
    """Return the number of the latest change of any alias, 0 without one."""
    return int(connection.execute(select(func.coalesce(func.max(t.AliasChangeRow.id), 0))).scalar_one())


def all_aliases(connection: Connection) -> list[Alias]:
    """Return all aliases, sorted by name."""
    return sorted(_aliases(connection, select(t.AliasRow)), key=lambda alias: alias.name)


def find_alias(connection: Connection, name: str) -> Alias | None:
    """Return the alias of a name, None if there is none."""
    return next(iter(_aliases(connection, select(t.AliasRow).where(t.AliasRow.name == name))), None)


def alias_changes(connection: Connection, name: str, most: int) -> list[AliasChange]:
    """Return the latest changes of an alias, newest first; also of one that is deleted."""
    rows = select(t.AliasChangeRow).where(t.AliasChangeRow.alias == name).order_by(t.AliasChangeRow.id.desc())
    return [_change(row) for row in connection.execute(rows.limit(most))]


def changes_of_model(connection: Connection, model: str, most: int) -> list[AliasChange]:
    """Return the latest changes that let an alias point to a model, newest first."""
    named = t.AliasChangeRow.targets.contains(canonical_json(model), autoescape=True)
    rows = connection.execute(select(t.AliasChangeRow).where(named).order_by(t.AliasChangeRow.id.desc()).limit(most))
    # A name may stand in the text of another one's targets only as a part of it, which is told apart here.
    return [change for change in map(_change, rows) if any(target.model == model for target in change.targets)]


def aliases_that_keep(connection: Connection, model: str) -> dict[str, str]:
    """Return alias -> why a model may not be removed: the alias points to it, or would after a rollback."""
    found: dict[str, str] = {}
    for alias in all_aliases(connection):
        if any(target.model == model for target in alias.targets):
            found[alias.name] = f"alias {alias.name!r} points to it"
        elif alias.before is not None and any(target.model == model for target in alias.before.targets):
            found[alias.name] = f"`zoo rollback {alias.name}` would go back to it"
    return found


def only_target(alias: Alias) -> str:
    """Return the model that an alias stands for. Raises AmbiguousName if it stands for several."""
    if len(alias.targets) > 1:
        names = ", ".join(target.model for target in alias.targets)
        raise AmbiguousName(f"alias {alias.name!r} stands for several models: {names}")
    return alias.targets[0].model


def put_change(
    connection: Connection,
    name: str,
    act: AliasAct,
    targets: Collection[AliasTarget],
    previous: int | None,
    figures: Any = None,
) -> Alias:
    """Let an alias point to models from now on; make it if there is none."""
    number = _insert(connection, name, act, targets, previous, figures)
    moved = connection.execute(update(t.AliasRow).where(t.AliasRow.name == name).values(change=number))
    if not moved.rowcount:
        connection.execute(insert(t.AliasRow).values(name=name, change=number))
    found = find_alias(connection, name)
    if found is None:
        raise NotFound(f"alias {name!r} was not written")
    return found


def drop_alias(connection: Connection, name: str) -> None:
    """Delete an alias; its history stays, with one change more."""
    _insert(connection, name, "delete", (), None, None)
    connection.execute(delete(t.AliasRow).where(t.AliasRow.name == name))


def _insert(
    connection: Connection,
    name: str,
    act: AliasAct,
    targets: Collection[AliasTarget],
    previous: int | None,
    figures: Any,
) -> int:
    values = {
        "alias": name,
        "kind": act,
        "targets": canonical_json([[target.model, target.share] for target in targets]),
        "previous": previous,
        "figures": canonical_json(figures),
        "created": datetime.now(UTC).replace(tzinfo=None),
    }
    (number,) = connection.execute(insert(t.AliasChangeRow).values(values)).inserted_primary_key or (0,)
    return int(number)


def _aliases(connection: Connection, query: Any) -> list[Alias]:
    rows = connection.execute(query).all()
    changes = _changes(connection, [row.change for row in rows])
    before = _changes(connection, [each.previous for each in changes.values() if each.previous is not None])
    found = [changes[row.change] for row in rows]
    return [Alias(now, None if now.previous is None else before[now.previous]) for now in found]


def _changes(connection: Connection, numbers: Collection[int]) -> Mapping[int, AliasChange]:
    if not numbers:
        return {}
    rows = connection.execute(select(t.AliasChangeRow).where(t.AliasChangeRow.id.in_(numbers)))
    return {row.id: _change(row) for row in rows}


def _change(row: Any) -> AliasChange:
    return AliasChange(
        id=row.id,
        alias=row.alias,
        act=row.kind,
        targets=tuple(AliasTarget(model, share) for model, share in json.loads(row.targets)),
        previous=row.previous,
        figures=json.loads(row.figures),
        created=row.created.replace(tzinfo=UTC),
    )
